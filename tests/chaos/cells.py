"""The jobs of `python -m chaos.same_bits`: each has the digests of one process.

A seed decides the number of ranks, the transport, the model, the shares, the failpoints
at which workers die, and the faults at random moments (chaos/faults.py). It decides
neither the speed of the machine nor the exact moments of the faults.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.launch import StartJob

from chaos.faults import ChaosJob
from chaos.reference import SWEEP_PROGRAM, Reference

PROGRAM = Path(__file__).with_name("pieces_program.py")
MODELS = ("digits", "characters", "nnx", "loop")  # of piece_models.py, which needs jax
SHARES = ("measured", "blocks", "turn", "random")
RANKS = (1, 2, 3, 5, 7)
TRANSPORTS: Mapping[str, dict[str, str]] = {
    "memory": {},
    "tcp": {"RINGJAX_SHM": "0"},
    "tls": {"RINGJAX_SHM": "0", "RINGJAX_TLS": "required"},
}
LIMIT = 200  # seconds for any wait
SWEEP_STEPS = 12  # some of them are repeated for the exponents
ARMED_LATER = 2  # so many of the workers that join later may die at a failpoint
REPAIRED = ("exact.sum", "exact.result")
# Failpoints at which workers die, and the passage before which each is likely passed:
# those of calls, which include the exchanges, and those of losses and joins.
IN_CALLS = (
    "call.agreed#200 call.moving#500 call.complete#200 call.closed#200 commit.saved#60"
)
IN_CHANGES = (
    "recovery.halted#3 recovery.reported#3 recovery.linked#3 recovery.installed#3 "
    "recovery.completed#3 epoch.install#4 join.ready#1 join.admitted#1 pause.asked#3 "
    "pause.said#3 pause.over#3 agreement.halfway#3 state.described#2 state.chunk#2 "
    "links.called#4 links.shared#4 memory.map#3"
)


@dataclass(frozen=True)
class Cell:
    """The model, the ranks and the faults of one elastic job.

    Attributes:
        failpoints: the text of RINGJAX_FAILPOINTS.
        survivor: the worker that no fault hits before the end.
        fails: a worker that may end by an error, because its sums have changed.
    """

    seed: int
    model: str
    ranks: int
    transport: str
    shares: str
    spares: int
    failpoints: str
    survivor: int
    fails: int


def draw(seed: int, transports: Sequence[str]) -> Cell:
    """Returns what the job of a seed tests."""
    rng = random.Random(seed)
    # Seeds in a row test all pairs of a transport and a model.
    turn, index = divmod(seed, len(MODELS))
    transport, model = transports[turn % len(transports)], MODELS[index]
    ranks, shares = rng.choice(RANKS[1:]), rng.choice(SHARES)
    survivor, points = rng.randrange(ranks), []
    for worker in range(ranks + ARMED_LATER):
        if worker != survivor and rng.random() < 0.7:
            among = IN_CALLS if rng.random() < 0.5 else IN_CHANGES
            point, _, most = rng.choice(among.split()).partition("#")
            points.append(f"{point}=kill@{worker}#{rng.randint(1, int(most))}")
    # An exchange repairs a flipped bit, also of the survivor. If it cannot, because the
    # sums of a worker have changed in its memory, this worker ends by an error.
    fails = rng.choice([worker for worker in range(ranks) if worker != survivor])
    for point, worker in (rng.choice(REPAIRED), survivor), ("exact.send", fails):
        bit, passage = rng.randrange(10**6), rng.randint(1, 60)
        points.append(f"{point}=flip({bit})@{worker}#{passage}")
    spares, text = rng.randrange(2), ";".join(points)
    return Cell(seed, model, ranks, transport, shares, spares, text, survivor, fails)


class References:
    """The processes with which jobs are compared, one for each model."""

    def __init__(self) -> None:
        self._stack, self._started = ExitStack(), dict[str, Reference]()

    def __getitem__(self, model: str) -> Reference:
        """Returns the process of a model, started when it is first needed."""
        if model not in self._started:
            started = self._stack.enter_context(Reference(model))
            started.after(1)  # its compiled programs are in the cache of all jobs
            self._started[model] = started
        return self._started[model]

    def close(self) -> None:
        """Ends the processes."""
        self._stack.close()


def run_cell(
    cell: Cell,
    reference: Reference,
    start_job: StartJob,
    folder: Path,
    seconds: float = 6,
) -> str:
    """Runs the elastic job of a seed. Returns a text about its faults.

    Raises:
        AssertionError: a digest differs, a worker has failed, or the job hangs.
    """
    failpoints = {"RINGJAX_FAILPOINTS": cell.failpoints}
    chaos = ChaosJob(
        *(start_job, folder, cell.ranks, 0.02),
        env=TRANSPORTS[cell.transport] | failpoints,
        options=["--same-bits", "--spares", str(cell.spares)],
        program=PROGRAM,
        slots=200,
        arguments=["", cell.model, cell.shares],
        replay=reference.replay,
        may_fail=[cell.fails],
    )
    rng = random.Random(cell.seed)
    chaos.wait_for_workers(2, LIMIT)
    chaos.inject_faults(rng, seconds, 0.6, [cell.survivor])
    workers = chaos.wait_for_workers(cell.ranks, LIMIT)
    # Now the survivor may die, too, if a worker remains that no failpoint can kill.
    safe = [worker for worker in workers if worker >= cell.ranks + ARMED_LATER]
    if safe and (pid := workers.get(cell.survivor)):
        chaos.inject("kill", cell.survivor, pid, rng)
        chaos.wait_for_workers(cell.ranks, LIMIT)
    chaos.wait_for_steps(9, LIMIT)
    result = chaos.end(LIMIT)
    output = chaos.job.launcher_output()
    acted = Counter(re.findall(r"failpoint \S+: (kill|flip)", output))
    counts = {"kill at failpoints": acted["kill"], "flip": acted["flip"]}
    counts |= chaos.counts()
    faults = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{result.steps} steps by {result.smallest} to {result.largest}; {faults}"


def run_sweep(
    ranks: int,
    transport: str,
    models: Sequence[str],
    references: References,
    start_job: StartJob,
) -> str:
    """Runs one job without faults: all models with all kinds of shares.

    Raises:
        AssertionError: with the digests that are wrong, missing or too many.
    """
    expected = {
        f"{model} {shares} {SWEEP_STEPS} {references[model].after(SWEEP_STEPS)}"
        for model, shares in itertools.product(models, SHARES)
    }
    job = start_job(
        *(ranks, [sys.executable, str(SWEEP_PROGRAM), str(SWEEP_STEPS), *models]),
        env=TRANSPORTS[transport] | {"RINGJAX_TILE_BYTES": "4096"},
        options=["--same-bits"],
    )
    assert job.wait(LIMIT) == 0, job.logs()
    wrong = [
        f"rank {rank}: {line}"
        for rank in range(ranks)
        for line in sorted(expected ^ set(job.output(rank).splitlines()))
    ]
    assert not wrong, "\n".join([f"expected {expected}", *wrong])
    return f"{len(expected)} digests on each rank"
