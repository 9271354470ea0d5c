"""`ringjax.pieces.step` in elastic jobs: no kill, join or freeze changes a bit."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping

import pytest
from chaos.faults import SETTINGS
from support.elastic_job import ElasticJob, Start

pytestmark = pytest.mark.timeout(240)

# The data of step REPEATED are so large that the step is made twice. KILL holds, for
# each worker, a step and how many pieces of that step the worker still loads; this
# needs even shares.
PROGRAM = """
import hashlib
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def digest(tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()

STEPS, REPEATED, PIECES = 24, 12, 6
SIZE_AT = dict(pair.split("=") for pair in os.environ.get("SIZE_AT", "").split())
KILL = dict(pair.split("=") for pair in os.environ.get("KILL", "").split())
kill_step, loads = map(int, KILL.get(str(WORKER), "-1:0").split(":"))

def load(number, piece):
    global loads
    if number == kill_step and not runtime.is_newcomer():
        if loads == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        loads -= 1
    x = np.random.default_rng([number, piece]).normal(size=(4, 5)).astype("f4")
    return x * np.float32(2.0**14 if number == REPEATED else 1.0)

def loss_of(params, data, key):
    x = data * jax.random.bernoulli(key, 0.8, data.shape)
    hidden = jnp.tanh(x @ params["a"])
    return ((hidden @ params["b"] - x.sum(1)) ** 2).mean()

step = ringjax.pieces.step(
    loss_of, optax.adam(0.05), PIECES, one_program="ONE_PROGRAM" in os.environ,
    balance="BALANCE" in os.environ)

def one_step(state):
    state.training, loss = step(state.training, load)
    return loss

@ringjax.elastic.run(warm_up=one_step)
def train(state):
    size = runtime.size()  # is constant until this function starts again
    say("size", size)
    while (number := int(state.training.number)) < STEPS:
        if size >= int(SIZE_AT.get(str(number), 0)):
            say("step", number)
            one_step(state)
        time.sleep(float(os.environ.get("PAUSE", 0)))
        state.commit()

rng = np.random.default_rng(0)
params = {"a": rng.normal(size=(5, 8)), "b": rng.normal(size=8)}
params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
if len(jax.local_devices()) > 1:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    place = {"a": P(None, "x"), "b": P("x")}
    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), place)
    params = jax.device_put(params, place)
    loaded, rows = load, NamedSharding(mesh, P("x"))
    load = lambda number, piece: jax.device_put(loaded(number, piece), rows)
state = ringjax.elastic.State(training=step.init(params, load))
train(state)
assert jax.tree.all(jax.tree.map(
    lambda old, new: old.sharding == new.sharding, params, state.training.params))
say("digest", digest(state.training))
"""


LIMIT = 110  # seconds for a job, which compiles in each of its ranks


def run(start: Start, np: int, env: Mapping[str, str] | None = None) -> ElasticJob:
    # The number of XLA's threads is part of the numerics on CPUs.
    return start(np, PROGRAM, env={"NPROC": "1", **(env or {})})


def wait_for_step(job: ElasticJob, worker: int, number: int) -> None:
    def reached() -> bool:
        return [str(number)] in job.lines(worker, "step")

    job.wait_for(reached, f"worker {worker} makes step {number}", LIMIT)


def digest(job: ElasticJob, worker: int) -> str:
    """Waits for the end of a worker; returns its digest."""
    assert job.wait(worker, LIMIT) == 0, job.logs()
    return job.lines(worker, "digest")[0][0]


def alone(start: Start, env: Mapping[str, str] | None = None) -> str:
    return digest(run(start, 1, env), 0)


TWO_DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
}


@pytest.mark.parametrize(
    "env", [{}, {"ONE_PROGRAM": "1"}, {"RINGJAX_SHM": "0"}, TWO_DEVICES]
)
def test_losses_in_pieces_and_repeated_steps_change_nothing(
    start: Start, env: dict[str, str]
) -> None:
    # Worker 1 ends in its second piece. Worker 0, the first rank, ends when step 12
    # has been exchanged once and is made again: it has loaded 2 pieces before.
    one_program = "ONE_PROGRAM" in env
    kills = {"KILL": "1=4:1 0=12:3"}
    job = run(start, 3, kills | env)
    found = digest(job, 2)
    assert job.lines(2, "size")[0] == ["3"]
    assert job.lines(2, "size")[-1] == ["1"] or one_program
    env.pop("RINGJAX_SHM", None)
    assert found == alone(start, env)


def test_nobody_of_the_start_is_there_at_the_end(start: Start) -> None:
    job = run(start, 2, {"KILL": "0=3:0 1=15:1", "SIZE_AT": "8=2"})
    wait_for_step(job, 1, 3)
    joined = job.add()
    assert digest(job, joined) == alone(start)
    assert job.lines(joined, "size") == [["2"], ["1"]], job.logs()


POINTS = ("call.agreed", "call.moving", "call.complete", "recovery.linked")


@pytest.mark.parametrize("passage", [9, 24])
def test_losses_in_exchanges_change_nothing(start: Start, passage: int) -> None:
    points = ";".join(
        f"{point}=kill@{worker}#{passage + 3 * worker if '.' in point else 1}"
        for worker, point in enumerate(POINTS[:3])
    )
    job = run(start, 4, {"RINGJAX_FAILPOINTS": points})
    assert digest(job, 3) == alone(start)
    assert {job.workers[worker].poll() for worker in range(3)} == {-signal.SIGKILL}


@pytest.mark.parametrize("seed", range(2))
def test_losses_at_random_moments_change_nothing(start: Start, seed: int) -> None:
    draws = random.Random(seed)
    job = run(start, 3, {"PAUSE": "0.02", "BALANCE": "1"})
    wait_for_step(job, 2, 0)
    *lost, left = draws.sample(range(3), 3)
    for worker in lost:
        time.sleep(draws.uniform(0, 0.3))  # the moments are what is tested
        job.kill(worker)
    assert digest(job, left) == alone(start)


def test_a_frozen_rank_changes_nothing(start: Start) -> None:
    job = run(start, 3, {"PAUSE": "0.02", **SETTINGS})
    wait_for_step(job, 1, 2)
    job.kill(1, signal.SIGSTOP)
    found = [digest(job, worker) for worker in (0, 2)]
    job.kill(1, signal.SIGCONT)
    assert job.wait(1) != 0
    assert found == [alone(start)] * 2
