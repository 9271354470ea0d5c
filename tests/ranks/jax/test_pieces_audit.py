"""Audits of `pieces.step` name the rank that computes or holds a wrong bit."""

from __future__ import annotations

import re

import pytest
from support.launch import Job, StartJob

# With FAULTS > 0, the worker with number WORKER gets wrong data of the piece that is
# audited in step 8, so many times: its gradients are wrong, and their checksum is not.
PROGRAM = """
import hashlib, os
import jax, jax.numpy as jnp, numpy as np, optax, ringjax
from ringjax import runtime

FAULTS, WORKER = int(os.environ["FAULTS"]), int(os.environ["WORKER"])
STEPS, EVERY = int(os.environ.get("STEPS", 12)), int(os.environ.get("EVERY", 1))
V = 6

def load(number, piece):
    global FAULTS
    data = np.random.default_rng([number, piece]).normal(size=(8, 3)).astype("f4")
    if FAULTS and (number, piece) == (8, 8 % V) and own() == WORKER:
        FAULTS -= 1
        data[0, 0] *= 1 + 2**-20
    return data

def own():
    worker = runtime.config().worker
    return ringjax.rank() if worker is None else worker

def loss_of(params, data, key):
    return jnp.mean((data @ params - 1) ** 2)

def one(state):
    state.training, loss = step(state.training, load)

@ringjax.elastic.run(warm_up=one)
def train(state):
    while state.training.number < STEPS:
        one(state)
        state.commit()

ringjax.init()
# Equal shares at all times, so that a test knows who audits a piece.
step = ringjax.pieces.step(
    loss_of, optax.adam(0.1), pieces=V, balance=False, audit=EVERY
)
state = ringjax.elastic.State(training=step.init(jnp.zeros(3), load))
if runtime.elastic():
    train(state)
else:
    while state.training.number < STEPS:
        one(state)
leaves = jax.tree.leaves(state.training)
text = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
print("hash", hashlib.sha256(text).hexdigest())
"""


def run(start_job: StartJob, np: int, *options: str, **env: str | int) -> Job:
    settings = {"FAULTS": 0, "WORKER": 0, "NPROC": 1, **env}
    texts = {name: str(value) for name, value in settings.items()}
    job = start_job(np, PROGRAM, env=texts, options=options)
    job.wait()
    return job


def hashes(job: Job) -> set[str]:
    logs = "".join(job.output(rank) for rank in range(job.np))
    return set(re.findall(r"hash (\w+)", logs))


# Of 3 ranks, rank 1 is the owner of piece 2, rank 2 the auditor, and rank 0 the
# referee. Of 2 ranks, rank 0 is the owner, and both are referees.
@pytest.mark.parametrize(
    ("np", "worker", "faults", "who"),
    [
        (3, 1, 1, "ranks 0, 1, 2 have computed .*: rank 1 is at fault"),
        (2, 0, 1, "ranks 0, 1 have computed .*: rank 0 is at fault"),
        (2, 1, 9, "ranks 0, 1 have computed .*: it is not known which"),
    ],
)
def test_a_rank_with_wrong_gradients_is_named(
    start_job: StartJob, np: int, worker: int, faults: int, who: str
) -> None:
    job = run(start_job, np, FAULTS=faults, WORKER=worker)
    text = "in step 8, " + who.replace(".*", "different gradients of piece 2")
    for rank in range(np):
        assert text in job.output(rank), job.logs()
    assert not hashes(job)


def test_a_rank_with_a_flipped_parameter_is_named(start_job: StartJob) -> None:
    flip = "pieces.parameter=flip(40)@1#6"
    job = run(start_job, 3, RINGJAX_FAILPOINTS=flip, EVERY=3)
    text = (
        "in step 6, ranks 0, 1, 2 have different parameters or optimizer states, so "
        "results since step 3 may be wrong: rank 1 is at fault"
    )
    for rank in range(3):
        assert text in job.output(rank), job.logs()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("np", "fault"),
    [
        (3, {"FAULTS": 9, "WORKER": 1}),
        (2, {"RINGJAX_FAILPOINTS": "pieces.parameter=flip(40)@0#6"}),
    ],
    ids=["gradients", "parameter"],
)
def test_an_elastic_job_goes_on_with_the_right_result(
    start_job: StartJob, np: int, fault: dict[str, str | int]
) -> None:
    right, job = run(start_job, 1), run(start_job, np, "--min-np", "1", **fault)
    assert hashes(job) == hashes(right) != set(), job.logs()
    lost = np == 3
    assert ("at fault, and is lost" in job.output(0)) == lost
    assert ("Fenced: ringjax.pieces.step: in step" in job.launcher_output()) == lost


def test_audits_of_right_results_raise_nothing(start_job: StartJob) -> None:
    job, right = (run(start_job, np, STEPS=150) for np in (3, 1))
    assert hashes(job) == hashes(right) != set(), job.logs()
