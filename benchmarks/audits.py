"""Counts flips that `ringjax.pieces.step` finds, and measures the cost of its audits.

Run `python -m benchmarks.audits MODE`. flips: makes one step twice, the second time
with a random bit of random memory flipped on a random rank, in an audited computation
or in an exchange, and counts the flips that were found, whether the right rank was
named, and the flips that changed a result and were not found. alarms: counts errors in
many steps without a flip. exchanges: counts errors, repetitions and wrong results of
many exchanges without a flip. cost: measures the time of steps with audits and without,
in turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringjax
from benchmarks.harness import jobs
from ringjax import _native, failpoints
from ringjax.collectives.exchange import exchange
from ringjax.errors import RingjaxError
from ringjax.pieces.audit import default_steps, duties
from ringjax.pieces.bits import hash_words

PIECES = 12
EXCHANGE_POINTS = ("exact.send", "exact.sum", "exact.result")
POINTS = ("pieces.parameter", "exact.gradient", *EXCHANGE_POINTS)


def load(number: int, piece: int) -> tuple[np.ndarray, np.ndarray]:
    return _samples(number % 16, piece)


@functools.cache
def _samples(number: int, piece: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([number, piece])
    return rng.normal(size=(32, 64)).astype("f4"), rng.integers(0, 10, 32)


def loss_of(params: Any, data: Any, key: jax.Array) -> jax.Array:
    x, y = data
    for weights in params[:-1]:
        x = jax.nn.relu(x @ weights)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], y)
    return losses.mean()


def make(width: int, audit: int | None) -> tuple[Any, Any]:
    """Returns a step and its first training."""
    sizes = (64, width, width, 10)
    rng = np.random.default_rng(1)
    params = [
        jnp.asarray(rng.normal(size=shape, scale=0.1), jnp.float32)
        for shape in itertools.pairwise(sizes)
    ]
    step = ringjax.pieces.step(
        loss_of, optax.adam(1e-3), pieces=PIECES, balance=False, audit=audit
    )
    return step, step.init(params, load)


def flips(options: argparse.Namespace) -> dict[str, Any]:
    step, training = make(16, 1)
    draw = random.Random(options.seed)  # alike on all ranks
    found: Counter[str] = Counter()
    for _ in range(options.trials):
        right, _ = step(training, load)
        point = draw.choice(POINTS)
        victim = _arm(point, int(training.number), draw)
        found[f"{point}: {_outcome(step, training, right, victim)}"] += 1
        failpoints.arm("", None)
        training = right
    return dict(sorted(found.items()))


def _arm(point: str, number: int, draw: random.Random) -> int:
    """Arms a flip of a random bit in one of the audited computations of a step."""
    size, bit = ringjax.size(), draw.randrange(10**8)
    victim = draw.randrange(size)
    # Three weights and the loss are added one by one, and exchanged together.
    passage = 1 if point in EXCHANGE_POINTS else draw.randrange(1, 5)
    if point == "exact.gradient":
        victim = draw.choice(duties(number, [PIECES // size] * size).voters)
    if ringjax.rank() == victim and point in failpoints.NATIVE:
        _native.arm_failpoint(point, "flip", bit, passage)
    elif ringjax.rank() == victim:
        failpoints.arm(f"{point}=flip({bit})#1", victim)
    return victim


def _outcome(step: Any, training: Any, right: Any, victim: int) -> str:
    try:
        wrong, _ = step(training, load)
    except RingjaxError as error:
        # Two ranks that differ cannot tell which of them is wrong.
        others = {victim: "right rank named", -1: "found, none named"}
        return others.get(error.rank, "found, another named")
    except jax.errors.JaxRuntimeError as error:
        ringjax.shutdown()  # a failed exchange ends a job that is not elastic
        ringjax.init()
        named = f"rank {victim} has sums that do not fit" in str(error)
        return "right rank named" if named else f"found, another named: {error}"
    differs = bool((hash_words(wrong) != hash_words(right)).any())
    changed = ringjax.eager.allreduce(np.array(int(differs)), ringjax.Sum) > 0
    return "changed a result, and MISSED" if changed else "changed no result"


def alarms(options: argparse.Namespace) -> dict[str, Any]:
    step, training = make(16, 1)
    for _ in range(options.trials):
        training, _ = step(training, load)  # an alarm would end the job
    return {"steps": options.trials, "alarms": 0}


def exchanges(options: argparse.Namespace) -> dict[str, Any]:
    """Makes `--trials` exchanges in compiled loops."""
    count, pieces = 1000, ringjax.size()
    sums = np.random.default_rng(ringjax.rank()).integers(-(2**50), 2**50, count)
    words = sums.view(np.uint64)
    weights = 2 * np.arange(count, dtype=np.uint64) + np.uint64(1)
    checksum = np.array([words.sum(), (words * weights).sum()], np.uint64)
    given = jnp.asarray(words.view(np.uint32).reshape(-1, 2))
    given_checksum = jnp.asarray(checksum.view(np.uint32))
    numbers = jnp.arange(20, dtype=jnp.int32)

    def call() -> Any:
        units = jnp.array([-40], jnp.int32)
        arguments = (given, numbers, numbers, units, given_checksum)
        return exchange(*arguments, sizes=[count], pieces=pieces)

    @jax.jit
    def run(times: int, right: Any) -> Any:
        def body(_: int, wrong: Any) -> Any:
            same = jax.tree.map(lambda x, y: (x == y).all(), call(), right)
            return wrong + ~jnp.stack(same).all()

        return jax.lax.fori_loop(0, times, body, jnp.int32(0))

    total = ringjax.eager.allreduce(sums, ringjax.Sum)
    right = call()
    mean = (total.astype(np.longdouble) * 2.0**-40 / pieces).astype(np.float32)
    assert (np.asarray(right[0]) == mean).all()
    before, wrong = _sent_bytes(), int(run(1, right))
    of_one = _sent_bytes() - before
    turns = [min(10_000, options.trials - i) for i in range(0, options.trials, 10_000)]
    wrong += sum(int(run(turn, right)) for turn in turns)  # an alarm would end the job
    repeated = (_sent_bytes() - before) / of_one - 1 - options.trials
    return {"exchanges": options.trials, "repeated": repeated, "wrong results": wrong}


def _sent_bytes() -> int:
    sets: Any = ringjax.stats()["process_sets"]
    sent: int = sets[0]["compiled"]["exchange"]["sent_bytes"]
    return sent


def cost(options: argparse.Namespace) -> dict[str, Any]:
    # Other programs disturb a step more than the rare audits of the default do. So an
    # audit in every step is measured, and divided by the default number of steps.
    runs = [_turn(*make(options.width, audit), 20) for audit in (0, 1)]
    times = [[run() for run in runs] for _ in range(options.trials)][2:]
    ratio = statistics.median(audited / plain for plain, audited in times)
    every = default_steps(ringjax.size(), PIECES)
    return {
        "ms a step": 1e3 * statistics.median(plain for plain, _ in times) / 20,
        "a step with an audit, times": ratio,
        "steps from one audit to the next": every,
        "cost by default": f"{100 * (ratio - 1) / every:.2f} %",
    }


def _turn(step: Any, training: Any, steps: int) -> Callable[[], float]:
    def run() -> float:
        nonlocal training
        began = time.perf_counter()
        for _ in range(steps):
            training, _ = step(training, load)
        return time.perf_counter() - began

    return run


MODES = {"flips": flips, "alarms": alarms, "exchanges": exchanges, "cost": cost}


def main() -> None:
    """Starts the ranks, or is one of them; prints the numbers of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("-np", type=int, default=3)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        names = ("trials", "width", "seed")
        words = [w for n in names for w in (f"--{n}", str(getattr(options, n)))]
        [row] = jobs.run(
            *(options.np, "benchmarks.audits", options.mode, "--rank", *words),
            options=["--same-bits"],
            timeout=24 * 3600,
        )
        print(options.mode, f"on {options.np} ranks:")
        for name, value in row.items():
            print(f"  {name}: {value}")
        return
    ringjax.init()
    row = MODES[options.mode](options)
    if ringjax.rank() == 0:
        jobs.report(row)


if __name__ == "__main__":
    main()
