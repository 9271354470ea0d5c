"""ringjax.broadcast from every root."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.draws import draw
from support.stacked import check_derivatives, draw_all, equal, raises

import ringjax
from ringjax import broadcast

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]


@pytest.mark.ranks(1, 2, 3)
def test_from_every_root(world) -> None:
    xs = draw_all(world.size, (3, 5), ("bool", "bfloat16", "complex128"))
    for root in range(world.size):
        for f in (broadcast, jax.jit(broadcast, static_argnums=1)):
            for dtype, out in f(
                {d: x[world.rank] for d, x in xs.items()}, root
            ).items():
                equal(out, xs[dtype][root])


def test_trees_and_shapes(world) -> None:
    root = world.size - 1
    shapes = [(), (0,), (2, 0, 3), (7,), (300, 1001)]
    stacks = [draw(world.size, s, "float32", i) for i, s in enumerate(shapes)]
    tree = {"p": [s[world.rank] for s in stacks], "step": world.rank}
    out = broadcast(tree, root_rank=root, name="state")
    for got, stack in zip(out["p"], stacks, strict=True):
        equal(got, stack[root])
    assert int(out["step"]) == root
    listed = ringjax.grouped_broadcast([1.0, tree["p"][3]], np.int64(root))
    equal(listed[1], stacks[3][root])


def test_vmap_and_scan(world) -> None:
    xs = draw(world.size, (4, 3), "float64")
    equal(jax.vmap(lambda x: broadcast(x, 0), 1, 1)(xs[world.rank]), xs[0])

    def body(carry, x):
        return broadcast(carry + x, world.size - 1), carry

    out, _ = jax.lax.scan(body, jnp.zeros(3), xs[world.rank])
    equal(out, xs[-1].sum(0), 1e-12)


def test_derivatives(world) -> None:
    root = world.size - 1
    check_derivatives(
        world.rank,
        lambda x: broadcast(x, root),
        lambda xs: [xs[root]] * len(xs),
        draw(world.size, (5,), "float64"),
    )


def test_bad_roots(world) -> None:
    x = jnp.ones(3)
    members = str(list(range(world.size)))
    with raises(ValueError, "ringjax.broadcast", f"root_rank is {world.size}", members):
        broadcast(x, world.size)
    with raises(ValueError, "root_rank is -1"):
        broadcast(x, -1)
    with raises(TypeError, "root_rank must be an int, got 0.0 of type float"):
        broadcast(x, 0.0)
    with raises(TypeError, "root_rank must be an int, got True"):
        broadcast(x, True)
    with raises(TypeError, "`root_rank` must be known while tracing"):
        jax.jit(broadcast)(x, 0)


@pytest.mark.ranks(3)
def test_process_set_counts_roots_in_the_world(world) -> None:
    pair = ringjax.add_process_set([1, 2])
    try:
        if world.rank == 0:
            with raises(ValueError, "ringjax.broadcast", "process_set", "this rank, 0"):
                broadcast(1.0, 2, process_set=pair)
        else:
            with raises(ValueError, "root_rank is 0", "[1, 2]"):
                broadcast(1.0, 0, process_set=pair)
            assert float(broadcast(float(world.rank), 2, process_set=pair)) == 2.0
            check = jax.grad(lambda x: broadcast(x, 2, process_set=pair) * world.rank)
            assert float(check(1.0)) == (3.0 if world.rank == 2 else 0.0)
            rows = ringjax.allgather(np.float32(world.rank), process_set=pair)
            assert rows.tolist() == [1.0, 2.0]
            parts = ringjax.reducescatter(jnp.ones(3), process_set=pair)
            assert parts.shape == (3 - world.rank,)
    finally:
        ringjax.remove_process_set(pair)
    assert float(ringjax.allreduce(1.0, ringjax.Sum)) == 3.0


@pytest.mark.ranks(2, 3)
def test_different_roots_raise_on_all_ranks(world) -> None:
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "broadcast"):
        jax.block_until_ready(broadcast(jnp.ones(3), min(world.rank, 1)))
    equal(broadcast(jnp.full(3, float(world.rank)), 1), np.ones(3))
