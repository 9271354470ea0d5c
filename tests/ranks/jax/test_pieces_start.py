"""Ranks that would compute other bits are named in the first step of `pieces.step`."""

from __future__ import annotations

import pytest
from support.launch import StartJob

from ringjax.pieces import start_check

# RANK differs between the ranks; `change` makes rank 1 different.
PROGRAM = """
import os
RANK = int(os.environ["RINGJAX_RANK"])
os.environ["NPROC"] = "1"
V, start, flags, scale = 6, 0.0, "", 1.0
if RANK == 1:
    {change}
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
import jax.numpy as jnp, numpy as np, optax, ringjax

def load(number, piece):
    return np.random.default_rng([number, piece]).normal(size=(8, 3)).astype("f4")

def loss_of(params, data, key):
    return scale * jnp.mean((data @ params - 1) ** 2)

ringjax.init()
step = ringjax.pieces.step(loss_of, optax.sgd(0.1), pieces=V)
training = step.init(jnp.full(3, start), load)
training, loss = step(training, load)
print("loss:", float(loss))
"""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("os.environ['NPROC'] = '3'", "XLA threads is 1 on ranks 0, 2 and 3 on"),
        ("V = 12", "pieces is 6 on ranks 0, 2 and 12 on rank 1; pass the same number"),
        ("scale = 2.0", "on rank 1; the loss must not use rank()"),
        ("start = 0.5", "on rank 1; begin with equal parameters (the same seed"),
    ],
)
def test_the_rank_that_differs_is_named(
    start_job: StartJob, change: str, text: str
) -> None:
    job = start_job(3, PROGRAM.format(change=change))
    assert job.wait() == 1
    found = job.launcher_output()
    assert "InvalidArgument: ringjax.pieces.step: ranks would compute" in found, found
    assert text in found, found
    assert "loss:" not in job.output(0)
    if "scale" in change:
        lines = job.output(1).split("of this rank have\n")[1].splitlines()
        assert "1.0" in lines[0] and "2.0" in lines[1], lines


def test_the_text_shows_only_features_that_differ() -> None:
    features = {0: "avx avx2 fma", 1: "avx avx2 avx512f fma", 2: "avx avx2 fma"}
    facts = {rank: {"CPU features": text} for rank, text in features.items()}
    assert start_check.difference(facts).split(": ")[1] == (
        "CPU features is less on ranks 0, 2 and avx512f on rank 1; "
        "use hosts with one kind of CPU"
    )
    flags = {0: {"XLA_FLAGS": ""}, 1: {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}}
    assert "XLA_FLAGS is not set on rank 0 and --xla_cpu" in start_check.difference(
        flags
    )


def test_equal_ranks_are_not_refused(start_job: StartJob) -> None:
    changes = "flags = ' --xla_dump_hlo_as_text=false'; os.chdir('/')"
    job = start_job(3, PROGRAM.format(change=changes))
    assert job.wait() == 0, job.logs()
    assert len({job.output(rank) for rank in range(3)}) == 1
    assert "warning" not in job.output(0)


def test_several_threads_are_a_warning(start_job: StartJob) -> None:
    script = PROGRAM.replace('["NPROC"] = "1"', '["NPROC"] = "2"')
    job = start_job(2, script.format(change="pass"))
    assert job.wait() == 0, job.logs()
    assert (
        "warning: ringjax.pieces.step: XLA has more than one thread (2 on"
        in job.output(0)
    )
    assert "warning" not in job.output(1)


# Worker 1 is killed, and its replacement has another number of threads. Rank 0 trains
# until the replacement has joined and was lost.
JOIN = """
import os
os.environ["NPROC"] = "1" if int(os.environ["RINGJAX_WORKER"]) < 2 else "3"
import jax.numpy as jnp, numpy as np, optax, ringjax
from ringjax.elastic import sync_plan

def load(number, piece):
    return np.random.default_rng([number, piece]).normal(size=(8, 3)).astype("f4")

def loss_of(params, data, key):
    return jnp.mean((data @ params - 1) ** 2)

def one(state):
    state.training, loss = step(state.training, load)

@ringjax.elastic.run(warm_up=one)
def train(state):
    global joined
    joined |= max(sync_plan.current_plan().workers) > 1
    while not (joined and ringjax.size() == 1):
        one(state)
        state.commit()

joined = False
ringjax.init()
step = ringjax.pieces.step(loss_of, optax.sgd(0.1), pieces=6)
train(ringjax.elastic.State(training=step.init(jnp.zeros(3), load)))
print("the end")
"""


@pytest.mark.timeout(120)
def test_a_newcomer_that_differs_ends_alone(start_job: StartJob) -> None:
    kill = {"RINGJAX_FAILPOINTS": "commit.saved=kill@1#3"}
    job = start_job(2, JOIN, env=kill, options=["--min-np", "1"])
    assert job.wait(90) == 0, job.logs()
    assert "the end" in job.output(0)
    assert "XLA threads is 1 on rank 0 and 3 on" in job.output(2), job.logs()
