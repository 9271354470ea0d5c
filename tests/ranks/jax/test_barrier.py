"""ringjax.barrier: no rank returns before all ranks have called it."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.stacked import equal, raises

import ringjax

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]


@pytest.mark.ranks(1, 2, 3)
def test_barrier_waits_for_the_slowest_rank(world, tmp_path) -> None:
    last = world.size - 1
    arrived = Path(ringjax.broadcast_object(str(tmp_path / "arrived"), last))
    if world.rank == last:
        time.sleep(0.3)  # without a barrier, the others would continue meanwhile
        arrived.touch()
    ringjax.barrier(name="epoch")
    assert arrived.exists()


def test_barrier_in_a_compiled_program(world) -> None:
    @jax.jit
    def program(x):
        x = ringjax.allreduce(x, ringjax.Sum)
        ringjax.barrier()
        return ringjax.allreduce(x, ringjax.Max)

    for _ in range(3):
        equal(program(jnp.ones(3)), np.full(3, world.size, np.float32))
    equal(jax.grad(lambda x: jnp.sum(program(x) ** 0))(jnp.ones(3)), np.zeros(3, "f4"))

    def body(carry, x):
        ringjax.barrier()
        return carry + x, None

    equal(jax.lax.scan(body, 0.0, jnp.ones(4))[0], np.float32(4))


@pytest.mark.ranks(2, 3)
def test_another_operation_raises_on_all_ranks(world) -> None:
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "barrier"):
        if world.rank:
            ringjax.barrier()
        else:
            jax.block_until_ready(ringjax.allreduce(jnp.ones(3)))
    ringjax.barrier()
