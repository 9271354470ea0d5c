"""Jobs of groups of ranks, whose results show which groups contributed.

Group g contributes 2**g, so the mean of a step shows which groups contributed. All
shards of a step must be means over one set of groups, even if one of their calls
failed.
"""

from __future__ import annotations

import itertools

from support import leaks
from support.launch import Job

STEPS = """
import os, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import ringjax

ringjax.init()
GROUP = int(os.environ.get("RINGJAX_WORKER", ringjax.rank())) // ringjax.group_size()
END = sys.argv[0] + ".end"
say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())
mesh = jax.make_mesh((jax.device_count(),), ("d",), (jax.sharding.AxisType.Auto,))
cut = NamedSharding(mesh, P("d"))

def filled(shape, value):
    return jax.make_array_from_callback(
        shape, cut, lambda index: np.full(shape, value, "f4")[index])

tx = ringjax.allreduce_grads(bucket_bytes=64)
grads = {"a": filled((4, 7), 2.0**GROUP), "b": filled((50_004,), 2.0**GROUP)}
step = jax.jit(tx.update)

def warm_up(state):
    jax.block_until_ready(step(grads, state.tx))

@ringjax.elastic.run(warm_up=warm_up)
def train(state):
    peers = ringjax.replica_set().ranks
    say("from", state.step, ringjax.rank(), ringjax.size(), *peers)
    while not state.over:
        updates, state.tx = jax.block_until_ready(step(grads, state.tx))
        shards = [s.data for x in updates.values() for s in x.addressable_shards]
        (value,) = {float(v) for shard in shards for v in np.unique(shard)}
        say("step", state.step, value)
        state.step += 1
        time.sleep(0.005)
        if state.step % 5 == 0:
            over = ringjax.allreduce(np.float32(os.path.exists(END)), op=ringjax.Max)
            state.over = bool(over)
            state.commit()
    collectives = sys.modules.get("ringjax.xla.jax_collectives")
    say("carried", "ringjax" if collectives and collectives._current else "Gloo")
    say("end", state.step)

train(ringjax.elastic.State(tx=tx.init(grads), step=0, over=False))
"""


def lines(job: Job, worker: int, word: str) -> list[list[str]]:
    found = [line.split() for line in job.output(worker).splitlines()]
    return [line[1:] for line in found if line[:1] == [word]]


def wait_for_steps(job: Job, workers: set[int], steps: int, limit: float = 60) -> None:
    """Waits until each worker has made `steps` steps."""
    late = leaks.settle(
        lambda: [f"{w}" for w in workers if len(lines(job, w, "step")) < steps], limit
    )
    assert not late, f"workers {late} do not come to step {steps}\n{job.logs()}"


def wait_until_joined(job: Job, worker: int) -> None:
    missing = leaks.settle(lambda: [] if lines(job, worker, "from") else ["it"], 60)
    assert not missing, f"worker {worker} does not come\n{job.logs()}"


def finish_and_check(job: Job, workers: set[int]) -> None:
    """Ends the job. Checks that its steps are equal on all workers."""
    (job._folder / "script.py.end").touch()
    assert job.wait(60) == 0, job.logs()
    ends = {tuple(*lines(job, worker, "end")) for worker in workers}
    assert len(ends) == 1, job.logs()
    (steps,) = ends.pop()
    values: dict[str, str] = {}
    for worker in range(40):
        made = lines(job, worker, "step")
        for number, value in made:
            assert values.setdefault(number, value) == value, (number, job.logs())
        numbers = [int(number) for number, _ in made]
        # No step was made twice or left out.
        assert numbers == list(range(numbers[0], numbers[0] + len(made))) if made else 1
    assert len(values) == int(steps), job.logs()
    groups = range(20)
    means = {
        sum(2.0**g for g in some) / len(some)
        for n in (1, 2, 3, 4)
        for some in itertools.combinations(groups, n)
    }
    for value in map(float, values.values()):
        assert any(abs(value - mean) < 1e-6 * mean for mean in means), value
