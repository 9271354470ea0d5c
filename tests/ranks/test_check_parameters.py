"""RINGJAX_CHECK_PARAMETERS as a setting of a job: equal on all ranks, on or off."""

from __future__ import annotations

from support.launch import StartJob

PROGRAM = """
import jax
import jax.numpy as jnp
import ringjax
from ringjax.optim import AllreduceState

ringjax.init()
tx = ringjax.allreduce_grads()
params = {"w": jnp.full(3, float(ringjax.rank()))}
state = AllreduceState(jnp.array([777], jnp.uint32))  # as if from a checkpoint
update = jax.jit(tx.update)
for _ in range(3):
    updates, state = update(params, state, params)
jax.block_until_ready(updates)
"""
DIFFER = "parameters differ at optimizer step"


def test_the_first_step_of_every_process_is_checked(
    start_job: StartJob,
) -> None:
    job = start_job(2, PROGRAM)
    assert job.wait() == 0, job.logs()
    assert job.output(0).count(f"{DIFFER} 777: 'w' of rank 1") == 1
    assert DIFFER not in job.output(1)


def test_the_parameter_check_can_be_off(start_job: StartJob) -> None:
    job = start_job(2, PROGRAM, env={"RINGJAX_CHECK_PARAMETERS": "0"})
    assert job.wait() == 0, job.logs()
    assert DIFFER not in job.output(0)


def test_ranks_that_would_check_at_different_steps_do_not_start(
    start_job: StartJob,
) -> None:
    script = """
    import os
    os.environ["RINGJAX_CHECK_PARAMETERS"] = os.environ["RINGJAX_RANK"]
    import ringjax
    from support import numpy_only
    ringjax.init()
    """
    job = start_job(2, script)
    assert job.wait() != 0
    assert (
        "RINGJAX_CHECK_PARAMETERS must be alike on all ranks: it is 0 on rank 0 and 1 "
        "on rank 1" in job.logs()
    )
