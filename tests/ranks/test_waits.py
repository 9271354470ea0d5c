"""Ranks that wait for a late rank: how long, and what their warnings and errors say.

For compiled programs and for named operations, the errors name the host of the late
rank, its last operation, and the line of Python that the rank executes.
"""

from __future__ import annotations

import re

import pytest
from support.elastic_job import Start
from support.elastic_steps import (
    LOOP,
    check_steps,
    stop_loops,
    wait_for_first_steps,
    wait_for_more_steps,
)
from support.launch import Job, StartJob

HEAD = """
import ctypes, os, sys, time
import numpy as np
import ringjax
from ringjax import eager

ringjax.init()
rank = ringjax.rank()

def load_batch():
    time.sleep(120)

def hold_the_lock():
    ctypes.PyDLL(None).sleep(120)

def attempt(call):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        took = time.monotonic() - began
        sys.stdout.write(f"caught after {took:.2f} s: {error}\\n")
        sys.stdout.flush()
        return
    print("nothing was wrong", flush=True)
"""

CORE = """
from support import numpy_only

def add(name):
    numpy_only.allreduce(np.ones(8, "f4"), name=name)
"""

JAX = """
import jax, jax.numpy as jnp

def add(name):
    jax.block_until_ready(ringjax.allreduce(jnp.ones(8), op=ringjax.Sum, name=name))
"""

TORCH = """
import torch
import ringjax.torch as hvd

def add(name):
    hvd.allreduce(torch.ones(8), op=hvd.Sum, name=name)
"""

LATE = """
add("before")
if rank == 1:
    load_batch()
with ringjax.collective_timeout(2):
    attempt(lambda: add("grads"))
sys.exit(1)
"""

LOCATION = r"it is at script\.py:\d+ in load_batch"
WARNING = {"RINGJAX_STALL_WARNING": "1"}


def _caught(job: Job, rank: int) -> list[tuple[float, str]]:
    found = re.findall(r"caught after ([\d.]+) s: (.*)", job.output(rank))
    return [(float(seconds), text) for seconds, text in found]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_late_rank_is_named_with_host_last_call_and_line(
    start_job: StartJob, framework: str
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    operations = {"jax": JAX, "torch": TORCH}[framework]
    job = start_job(2, HEAD + operations + LATE, env=WARNING)
    assert job.wait(60) == 1, job.logs()
    last = r"its last call was allreduce 'before' \(seq \d+\)[^;]*; " + LOCATION
    if framework == "jax":
        text = r"rank 1 on \S+ has not called allreduce 'grads' \(f32\[8\], SUM, seq "
        text += rf"\d+\) for 2 s; {last}"
        warning = rf"for rank 1 on \S+ \({last}\); still waiting"
    else:
        text = r"rank 1 has not submitted allreduce 'grads' \(f32\[8\], SUM\) for 2 s; "
        text += rf"rank 1 on \S+: {last}"
        warning = rf"'grads' .* s; rank 1 on \S+: {last}; still waiting"
    ((_, error),) = _caught(job, 0)
    assert re.search(text, error), (error, job.logs())
    assert re.search(warning, job.output(0)), job.logs()
    mine = job.output(1)
    assert "rank 0 waits for this rank to call allreduce 'grads'" in mine
    assert "the main thread is at" in mine
    assert re.search(r'script\.py", line \d+, in load_batch', mine), job.logs()
    assert mine.count("the main thread is at") == 1


def test_a_late_rank_that_holds_the_gil_is_reported(
    start_job: StartJob,
) -> None:
    # Two ranks wait for rank 1, each until the timeout of the job.
    script = LATE.replace("load_batch()", "hold_the_lock()")
    limit = {"RINGJAX_COLLECTIVE_TIMEOUT": "3"}
    job = start_job(3, HEAD + CORE + script, env=limit)
    assert job.wait(60) == 1, job.logs()
    for rank in (0, 2):
        ((_, error),) = _caught(job, rank)
        assert "rank 1 on " in error, job.logs()
        assert "its last call was allreduce 'before'" in error, job.logs()
        assert "its interpreter is busy" in error, job.logs()


SHORT_TIMEOUTS = """
import jax, jax.numpy as jnp

pair = ringjax.add_process_set([0, 1], timeout=1.2)

def named():
    eager.allreduce(np.ones(3), name="named", process_set=pair)

@jax.jit
def compiled(x):
    with ringjax.collective_timeout(1.5):
        return ringjax.allreduce(x, name="compiled", process_set=pair)

if rank == 1:
    load_batch()
attempt(named)
with ringjax.collective_timeout(0.5):
    attempt(named)
attempt(lambda: jax.block_until_ready(compiled(jnp.ones(2))))
sys.exit(1)
"""


def test_the_shortest_timeout_applies(start_job: StartJob) -> None:
    job = start_job(2, HEAD + SHORT_TIMEOUTS)  # the timeout of the job is 60 s
    assert job.wait(60) == 1, job.logs()
    caught = _caught(job, 0)
    limits = [1.2, 0.5, 1.5]
    names = ["not submitted allreduce 'named'"] * 2 + ["not called allreduce 'compile"]
    assert len(caught) == 3, job.logs()
    for (seconds, text), limit, name in zip(caught, limits, names, strict=True):
        assert limit <= seconds, job.logs()
        assert f"for {limit:g} s; " in text
        assert name in text
        assert re.search(LOCATION, text), (text, job.logs())


ELASTIC = (
    LOOP
    + """
from support import numpy_only

grads = {"a": np.full(7, 2.0**WORKER, "f4"), "b": np.full((3, 5), 2.0**WORKER, "f4")}

def load_batch():
    time.sleep(120)

def step(state):
    if WORKER == 1 and os.path.exists(sys.argv[0] + ".hang"):
        load_batch()
    return {k: numpy_only.allreduce(x, "Average") for k, x in grads.items()}, state

train(step, None)
"""
)


def test_an_elastic_job_loses_a_rank_that_does_not_call_within_the_limit(
    start: Start,
) -> None:
    env = {"RINGJAX_LOG_LEVEL": "info", "RINGJAX_COLLECTIVE_TIMEOUT": "4"}
    job = start(4, ELASTIC, env=env)
    wait_for_first_steps(job)
    job.kill(3)
    wait_for_more_steps(job, {0, 1, 2}, 20)  # in the second epoch
    job.create_flag("hang")
    job.wait_for_line(0, "step", len(job.lines(0, "step")) + 1)
    wait_for_more_steps(job, {0, 2}, 30)
    stop_loops(job)
    assert (job.wait(0), job.wait(2)) == (0, 0), job.logs()
    check_steps(job, {0, 2}, whole=False)
    text = r"rank 1 on \S+ has not called allreduce .* for 4 s; its last call was "
    assert re.search(text + rf".*; {LOCATION}", job.errors(0)), job.errors(0)
