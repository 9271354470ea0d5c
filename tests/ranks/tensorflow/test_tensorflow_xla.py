"""Collectives in `tf.function(jit_compile=True)`, through the handlers of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.frameworks import in_ranks

tf, hvd = in_ranks("tensorflow"), in_ranks("ringjax.tensorflow")

pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("tensorflow")]


def compiled(function: Callable[..., Any], *tensors: Any) -> Any:
    return tf.function(function, jit_compile=True)(*tensors)


def mine(world: Any, shape: Any) -> Any:
    values = np.random.default_rng(world.rank).integers(0, 5, shape)
    return tf.constant(values, tf.float32)


def all_ranks(world: Any, shape: Any) -> np.ndarray:
    draws = [np.random.default_rng(r).integers(0, 5, shape) for r in range(world.size)]
    return np.stack(draws).astype(np.float32)


def test_all_operations(world) -> None:
    rows = 2 * world.size

    def every(x: Any) -> Any:
        return (
            hvd.allreduce(x, op=hvd.Sum, name='a "name"\n'),
            hvd.allreduce(x, op=hvd.Max, prescale_factor=0.1),
            hvd.broadcast(x, 1),
            hvd.allgather(x),
            hvd.reducescatter(x[1:], op=hvd.Sum),
            hvd.alltoall(x),
            hvd.rank_op() + hvd.size_op(),
        )

    x, xs = mine(world, (rows, 3)), all_ranks(world, (rows, 3))
    outs = [out.numpy() for out in compiled(every, x)]
    near = np.testing.assert_allclose
    near(outs[0], xs.sum(0))
    near(outs[1], xs.max(0) * np.float32(0.1), rtol=1e-6)
    near(outs[2], xs[1])
    near(outs[3], np.concatenate(xs))
    near(outs[4], np.array_split(xs.sum(0)[1:], world.size)[world.rank])
    near(outs[5], np.concatenate([np.split(a, world.size)[world.rank] for a in xs]))
    assert outs[6] == world.rank + world.size


def test_dtypes_in_one_group(world) -> None:
    kinds = (tf.float16, tf.bfloat16, tf.float64, tf.int8, tf.int64, tf.uint32)

    def group(x: Any) -> Any:
        return hvd.grouped_allreduce([tf.cast(x, k) for k in kinds], op=hvd.Sum)

    total = all_ranks(world, (4,)).sum(0)
    for out, kind in zip(compiled(group, mine(world, (4,))), kinds, strict=True):
        assert out.dtype == kind
        np.testing.assert_array_equal(tf.cast(out, tf.float32), total)


def test_many_keep_their_order(world) -> None:
    @tf.function(jit_compile=True)
    def many(x: Any) -> Any:
        return [hvd.allreduce(x * i, op=hvd.Sum) for i in range(40)]

    for _ in range(3):
        for i, out in enumerate(many(mine(world, (3,)))):
            np.testing.assert_array_equal(out, all_ranks(world, (3,)).sum(0) * i)


def test_gradients(world) -> None:
    def gradient(function: Callable[[Any], Any]) -> Any:
        def of(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) * (world.rank + 1.0))
            return tape.gradient(loss, x)

        return compiled(of, tf.ones(world.size)).numpy().tolist()

    size, total = world.size, sum(range(1, world.size + 1))
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)) == [total] * size
    assert gradient(hvd.allgather) == pytest.approx([total / size] * size)
    root = total / size if world.rank == 0 else 0
    assert gradient(lambda x: hvd.broadcast(x, 0)) == pytest.approx([root] * size)
    assert gradient(hvd.alltoall) == list(range(1, size + 1))
    assert gradient(hvd.reducescatter) == list(range(1, size + 1))


def test_operations_that_cannot_be_compiled_raise_while_tracing(world) -> None:
    x = tf.ones(2 * world.size)

    def in_loop(x: Any) -> Any:
        for _ in tf.range(2):
            x = hvd.allreduce(x)
        return x

    with pytest.raises(ValueError, match="a branch, a loop or an inner function"):
        compiled(in_loop, x)
    uneven = [2 * world.size] + [0] * (world.size - 1)
    with pytest.raises(ValueError, match="splits that are not all the same"):
        compiled(lambda x: hvd.alltoall(x, uneven), x)
    with pytest.raises(ValueError, match=f"of {2 * world.size - 1} rows"):
        compiled(lambda x: hvd.alltoall(x[1:]), x)
    with pytest.raises(ValueError, match="which is not known"):
        compiled(lambda x: hvd.allgather(tf.boolean_mask(x, x > 0)), x)


def test_ranks_that_disagree_raise_and_continue(world) -> None:
    with pytest.raises(tf.errors.OpError, match="ranks disagree"):
        compiled(hvd.allreduce, tf.ones(1 + world.rank))
    out = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum), tf.ones(2))
    assert out.numpy().tolist() == [world.size] * 2
