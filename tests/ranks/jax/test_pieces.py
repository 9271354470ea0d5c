"""`ringjax.pieces.step` gives the same bits on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.launch import StartJob

pytestmark = pytest.mark.timeout(240)

PROGRAM = """
import os, sys
import ringjax
import ringjax.pieces
from support import piece_trainings

if "RANDOM" in os.environ:
    sys.modules["ringjax.pieces.step"].Shares = piece_trainings.RandomShares
ringjax.init()
names = os.environ.get("TRAININGS")
piece_trainings.print_digests(names.split() if names else piece_trainings.TRAININGS)
"""
# The number of XLA's threads is part of the numerics on CPUs.
ENV = {"NPROC": "1"}
LIMIT = 110  # seconds for a job, which compiles in each of its ranks


def digests(start_job: StartJob, ranks: int, **env: str) -> dict[str, str]:
    """Runs all trainings; returns the digests, which must be equal on all ranks."""
    job = start_job(ranks, PROGRAM, ENV | env)
    assert job.wait(LIMIT) == 0, job.logs()
    found = [
        dict(line.split() for line in job.output(rank).splitlines())
        for rank in range(ranks)
    ]
    assert all(one == found[0] for one in found), found
    assert len(found[0]) == (1 if "TRAININGS" in env else 4), job.logs()
    return found[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """The digests of one rank, computed by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        (2, {}),
        (3, {"RANDOM": "1"}),
        # Every rank compiles, so many ranks run only one of the trainings.
        (5, {"TRAININGS": "linen", "RINGJAX_SHM": "0"}),
        (7, {"TRAININGS": "nnx"}),
    ],
)
def test_one_digest_on_any_number_of_ranks(
    start_job: StartJob, alone: dict[str, str], ranks: int, env: dict[str, str]
) -> None:
    if not alone:
        alone |= digests(start_job, 1)
    assert digests(start_job, ranks, **env).items() <= alone.items()


SLOW = """
import sys, time
import jax.numpy as jnp
import numpy as np
import optax
import ringjax

ringjax.init()

def load(number, piece):
    time.sleep(0.1 * ringjax.rank())
    return np.ones(2, "f4")

step = ringjax.pieces.step(lambda p, data, key: (p * data).sum(), optax.sgd(0.1), 12)
training = step.init(jnp.zeros(2), load)
for _ in range(6):
    training, _ = step(training, load)
print("counts", *step._shares.counts)
"""


def test_a_slow_rank_gets_fewer_pieces(start_job: StartJob) -> None:
    job = start_job(2, SLOW, ENV)
    assert job.wait(60) == 0, job.logs()
    found = [re.findall(r"counts (\d+) (\d+)", job.output(rank)) for rank in (0, 1)]
    assert found[0] == found[1]
    fast, slow = map(int, found[0][0])
    assert fast + slow == 12 and slow <= 3, job.logs()


DEVICES = """
import jax, numpy as np, optax, ringjax
from jax.sharding import NamedSharding, PartitionSpec as P
from support.piece_trainings import digest

ringjax.init()
mesh = jax.make_mesh((2,), ("x",))  # of an explicit axis
halves, whole = (NamedSharding(mesh, spec) for spec in (P("x"), P()))

def load(number, piece):
    return np.random.default_rng([number, piece]).normal(size=(4, 4)).astype("f4")

def train(training, steps, load=load):
    for _ in range(steps):
        training, _ = step(training, load)
    return training

loss_of = lambda p, data, key: ((data @ p - 1) ** 2).mean()
step = ringjax.pieces.step(loss_of, optax.adam(0.1), 2)
start = step.init(jax.device_put(np.ones(4, "f4"), halves), load)
middle = train(start, 2)
end = train(middle, 2)
# Plain arrays, as from a file, go to the devices of the first training.
assert digest(train(jax.tree.map(np.asarray, middle), 2)) == digest(end)
assert end.params.sharding.spec[0] == end.opt_state[0].mu.sharding.spec[0] == "x"

other = NamedSharding(jax.make_mesh((2,), ("y",)), P("y"))
for wrong in (
    lambda: train(end, 1, lambda number, piece: jax.device_put(load(0, 0), halves)),
    lambda: step.init([jax.device_put(np.ones(4), x) for x in (halves, other)], load),
    lambda: ringjax.pieces.step(loss_of, optax.adam(0.1), 2).init(
        np.ones(4), lambda number, piece: jax.device_put(load(0, 0), halves)),
):
    try:
        wrong()
    except ValueError as error:
        print(error)
"""


def test_parameters_on_several_devices_keep_their_shardings(
    start_job: StartJob,
) -> None:
    env = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        "RINGJAX_SAME_BITS": "1",
    }
    job = start_job(1, DEVICES, ENV | env)
    assert job.wait(60) == 0, job.logs()
    data, params, one = job.output(0).splitlines()
    assert data.startswith("ringjax.pieces.step: load(4, 0) returned 'value' with the ")
    assert data.endswith("; all pieces of all steps need one sharding")
    assert "parameter '1', float32[4], has the sharding" in params
    assert "expected a NamedSharding over one mesh" in params
    assert one.endswith(
        "load(0, 0) returned 'value', float32[4, 4], on 2 devices, but the parameters "
        "are on one; put them on the same mesh by jax.device_put"
    )


CHECKPOINTS = """
import os, sys
import equinox, jax, orbax.checkpoint
from flax import serialization
from pathlib import Path
import ringjax
from support import piece_trainings
from support.piece_trainings import STEPS, digest, load

ringjax.init()
folder = Path(os.environ["FOLDER"])
flax, orb = folder / "flax", folder / "orbax"
step, training = piece_trainings.with_linen()
resumes = flax.exists()
if resumes:
    found = serialization.from_bytes(training, flax.read_bytes())
    with orbax.checkpoint.StandardCheckpointer() as files:
        other = files.restore(orb, training)
    assert digest(found) == digest(other)
    training = found
steps = STEPS if resumes or "WHOLE" in os.environ else 2
while training.number < steps:
    training, _ = step(training, load)
if ringjax.rank() == 0 and not resumes:
    flax.write_bytes(serialization.to_bytes(training))
    with orbax.checkpoint.StandardCheckpointer() as files:
        files.save(orb, training)
print("digest", digest(training))
"""


def test_checkpoints_resume_on_another_number_of_ranks(
    start_job: StartJob, tmp_path: Path
) -> None:
    def run(ranks: int, folder: str, **env: str) -> set[str]:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        job = start_job(ranks, CHECKPOINTS, {**ENV, "FOLDER": str(where), **env})
        assert job.wait(LIMIT) == 0, job.logs()
        texts = (job.output(rank) for rank in range(ranks))
        return {re.findall("digest (\\w+)", text)[0] for text in texts}

    whole = run(1, "whole", WHOLE="1")
    assert run(2, "stopped") != whole
    assert run(3, "stopped") == whole
