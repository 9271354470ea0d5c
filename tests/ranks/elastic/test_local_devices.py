"""Elastic jobs whose ranks have several devices each, on a mesh of CPU devices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import local_devices
from support.elastic_job import Start
from support.elastic_steps import LOOP, check_steps, stop_loops, wait_for_more_steps
from support.launch import StartJob
from support.rank_worker import World

import ringjax

MESH = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

def put(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))
"""

STEPS = (
    LOOP
    + MESH
    + """
tx = ringjax.allreduce_grads(overlap=OVERLAP, bucket_bytes=64)
mine = 2.0**WORKER
sizes = {"a": (4, 7), "b": (100_004,), "c": (3, 5)}
grads = {name: put(np.full(size, mine, "f4"), None if name == "c" else "d")
         for name, size in sizes.items()}

@jax.jit
def step(state):
    updates, state = tx.update(grads, state)
    return updates, state

def blocking_step(state):
    return jax.block_until_ready(step(state))

train(blocking_step, tx.init(grads))
say("compiled", step._cache_size())
"""
)

# Device 1 of rank 1 fails before it calls.
DEVICE_FAILS = (
    """
import numpy as np
import ringjax

ringjax.init()
"""
    + MESH
    + """
def fail_on_device_1(device, v):
    if ringjax.rank() == 1 and int(device) == 1:
        raise ValueError("this device fails")
    return v

def each(v):
    v = jax.pure_callback(fail_on_device_1, v, jax.lax.axis_index("d"), v)
    return ringjax.allreduce(v, name="x")

f = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P("d"),
                          check_vma=False))
f.lower(put(np.ones(4), "d")).compile()
ringjax.barrier()
try:
    jax.block_until_ready(f(put(np.ones(4), "d")))
except Exception:
    pass
x = put(np.ones(4), "d")
try:
    jax.block_until_ready(ringjax.allreduce(x))
except Exception as error:
    print("failed", str(error).replace("\\n", " "), flush=True)
"""
)


@pytest.mark.parametrize("overlap", [False, True])
def test_all_devices_of_the_survivors_finish_the_step(
    start: Start, overlap: bool
) -> None:
    """Kills ranks while a call moves data, after a call, and at an arbitrary moment."""
    kills = "call.moving=kill@2#25;call.complete=kill@0#60"
    env = {**local_devices.environment(4)(), "RINGJAX_FAILPOINTS": kills}
    job = start(4, f"OVERLAP = {overlap}\n" + STEPS, env=env)
    assert [job.wait(worker) for worker in (2, 0)] == [-9, -9], job.logs()
    wait_for_more_steps(job, {1, 3}, 10)
    job.kill(3)
    wait_for_more_steps(job, {1}, 10)
    stop_loops(job)
    assert job.wait(1) == 0, job.logs()
    check_steps(job, {1})
    assert job.lines(1, "compiled") == [["1"]]


def test_a_missing_device_is_named_within_the_timeout(
    start_job: StartJob,
) -> None:
    env = dict(local_devices.environment(4)())
    job = start_job(2, DEVICE_FAILS, {**env, "RINGJAX_COLLECTIVE_TIMEOUT": "3"})
    assert job.wait(60) == 0, job.logs()
    for rank in (0, 1):
        text = job.output(rank)
        # Both ranks have the same timeout. Rank 1 times out itself, or rank 0 times out
        # first and asks rank 1 what it waits for.
        named = "for device 1 of its own to come to allreduce 'x'"
        timeout, reply = (
            f"rank 1 waited 3 s {named}",
            rf"rank 1 on .*; it waits {named}",
        )
        assert re.search(f"{timeout}|{reply}", text), job.logs()
        # JAX must not print the error again at exit.
        assert "[0]<stderr>:Exception ignored" not in job.logs()


@pytest.mark.ranks(2, env=local_devices.environment(4))
def test_a_sharded_state_keeps_its_sharding_when_sent(
    world: World, tmp_path: Path
) -> None:
    """A joining rank receives the state, and a checkpoint restores it."""
    mesh = local_devices.mesh((2, 2))
    own = jax.tree.map(lambda x: x * (world.rank + 1), local_devices.parameters())

    def make_state(params: Any) -> Any:
        placed = local_devices.place(params, local_devices.TENSOR, mesh)
        return ringjax.elastic.State(params=placed, step=world.rank)

    def check(state: Any, factor: int) -> None:
        for key, value in local_devices.parameters().items():
            np.testing.assert_array_equal(np.asarray(state.params[key]), value * factor)
            where = NamedSharding(mesh, local_devices.TENSOR[key])
            assert state.params[key].sharding.is_equivalent_to(where, value.ndim)

    state = make_state(own)
    state.sync()
    check(state, 1)
    assert state.step == 0
    state = make_state(own)
    with ringjax.elastic.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(state)
    state.params = jax.tree.map(lambda x: x * 0, state.params)
    assert ringjax.elastic.Checkpointer(tmp_path).load(state) == world.rank
    check(state, world.rank + 1)
