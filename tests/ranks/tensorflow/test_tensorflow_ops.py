"""ringjax.tensorflow: every operation eagerly and in a graph, compared with NumPy.

test_tensorflow_graph.py tests loops, branches, threads and sessions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.frameworks import in_ranks

from ringjax.eager.dtypes import NUMBERS
from ringjax.errors import HorovodInternalError, Mismatch

tf, hvd = in_ranks("tensorflow"), in_ranks("ringjax.tensorflow")
# Most tests run on three ranks only; one test of each file also runs on two.
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("tensorflow")]

SHAPES = [(), (0,), (5,), (3, 4), (2, 0, 3)]

Run = Callable[..., Any]


@contextlib.contextmanager
def raises(kind: Any, *texts: str) -> Iterator[None]:
    """Expects an error whose text contains all `texts`."""
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value)


@pytest.fixture(params=["eager", "graph"])
def run(request: pytest.FixtureRequest) -> Run:
    """Calls a function directly, or in a `tf.function` with unknown shapes."""
    if request.param == "eager":
        return lambda function, *tensors: function(*tensors)

    traced: dict[Any, Any] = {}  # a cache, because tracing is slow

    def in_graph(function: Callable[..., Any], *tensors: Any) -> Any:
        specs = [tf.TensorSpec(None, tensor.dtype) for tensor in tensors]
        key = (function, *specs)
        if key not in traced:
            traced[key] = tf.function(function, specs, autograph=False)
        return traced[key](*tensors)

    return in_graph


def draw(rank: int, shape: Sequence[int], dtype: Any = "float32") -> Any:
    """Returns the input of `rank`: small integers, so that all sums are exact."""
    values = np.random.default_rng(rank).integers(0, 4, shape)
    return tf.cast(tf.constant(values, tf.int64), dtype)


def stacked(size: int, shape: Sequence[int], dtype: Any = "float32") -> np.ndarray:
    return np.stack([draw(r, shape, dtype).numpy() for r in range(size)])


def total(size: int, shape: Sequence[int], dtype: Any = "float32") -> np.ndarray:
    xs = stacked(size, shape, dtype)
    return xs.any(0) if dtype == tf.bool else xs.sum(0, dtype=xs.dtype)


def share(values: Any, world: Any) -> Any:
    return np.array_split(values, world.size)[world.rank]


def same(actual: Any, expected: Any) -> None:
    # np.asarray does not accept a bfloat16 scalar of TensorFlow.
    expected = np.asarray(getattr(expected, "numpy", lambda: expected)())
    assert isinstance(actual, tf.Tensor)
    assert actual.dtype.as_numpy_dtype == expected.dtype
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_array_equal(actual.numpy(), expected)


def test_every_dtype_round_trips(world, run: Run) -> None:
    """allreduce fills memory of TensorFlow, allgather returns memory of the core."""
    kinds = [(shape, tf.as_dtype(n)) for n in NUMBERS for shape in ((), (2, 3))]

    def both(*xs: Any) -> Any:
        outs = [hvd.allreduce(x, op=hvd.Sum) for x in xs]
        return outs + [hvd.allgather(x) for x in xs[1::2]]

    outs = run(both, *(draw(world.rank, *kind) for kind in kinds))
    expected = [total(world.size, *kind) for kind in kinds]
    expected += [np.concatenate(stacked(world.size, *kind)) for kind in kinds[1::2]]
    for out, value in zip(outs, expected, strict=True):
        same(out, value)


@pytest.mark.ranks(2, 3)
def test_all_operations_in_all_shapes(world, run: Run) -> None:
    rank, size = world.rank, world.size

    def all_of(x: Any) -> Any:
        reduced = [hvd.allreduce(x, op=op) for op in (hvd.Sum, hvd.Min, hvd.Max)]
        return [*reduced, hvd.broadcast(x, size - 1)]

    def all_with_rows(x: Any) -> Any:
        rows = tf.concat([x] * size, 0)
        return (
            hvd.allgather(x),
            hvd.reducescatter(x, op=hvd.Sum),
            hvd.alltoall(rows),
        )

    for shape in SHAPES:
        x, xs = draw(rank, shape), stacked(size, shape)
        expected = [xs.sum(0), xs.min(0), xs.max(0), xs[-1]]
        for out, value in zip(run(all_of, x), expected, strict=True):
            same(out, value)
        if shape:
            rows, part, swapped = run(all_with_rows, x)
            same(rows, np.concatenate(xs))
            same(part, share(xs.sum(0), world))
            same(swapped, np.concatenate(xs))
        same(x, draw(rank, shape))


def test_ops_factors_and_compression(world, run: Run) -> None:
    size, shape = world.size, (4, 3)
    x, xs = draw(world.rank, shape), stacked(size, shape)
    same(run(lambda x: hvd.allreduce(x, op=hvd.Product), x), xs.prod(0))
    np.testing.assert_allclose(run(hvd.allreduce, x), xs.mean(0), rtol=1e-6)
    three = np.float32(1.5) * xs.sum(0)
    factors = {"prescale_factor": 0.5, "postscale_factor": 3}
    same(run(lambda x: hvd.allreduce(x, op=hvd.Sum, **factors), x), three)
    out = run(lambda x: hvd.reducescatter(x, op=hvd.Sum, **factors), x)
    same(out, share(three, world))
    # The factor 1/3 must have the precision of float64, not of float32.
    y = tf.constant(3.0, tf.float64)
    out = run(lambda y: hvd.allreduce(y, op=hvd.Sum, prescale_factor=1 / 3), y)
    same(out, np.float64(size * (1 / 3 * 3)))
    # The average of integers is an integer.
    n = draw(world.rank, shape, tf.int32)
    means = stacked(size, shape, tf.float64).mean(0)
    same(run(hvd.allreduce, n), np.trunc(means).astype(np.int32))
    for how in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        out = run(lambda x, c=how: hvd.allreduce(x, op=hvd.Sum, compression=c), x)
        same(out, xs.sum(0))
        out = run(lambda n, c=how: hvd.allreduce(n, op=hvd.Sum, compression=c), n)
        same(out, total(size, shape, tf.int32))


def test_average_is_deprecated(world) -> None:
    x = draw(world.rank, (3,))
    with pytest.warns(DeprecationWarning, match="op=Sum"):
        same(hvd.allreduce(x, average=False), total(world.size, (3,)))
    with raises(ValueError, "`op` supersedes `average`"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def test_groups(world, run: Run) -> None:
    size = world.size
    kinds = [((3,), tf.float32), ((2, 2), tf.int64), ((4, 1), tf.bfloat16)]
    xs = [draw(world.rank, *kind) for kind in kinds]
    sums = [total(size, *kind) for kind in kinds]

    def check(function: Callable[..., Any], expected: Any) -> None:
        outs = run(lambda *xs: function(list(xs)), *xs)
        assert type(outs) is list
        for out, value in zip(outs, expected, strict=True):
            same(out, value)

    check(lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum, name="g"), sums)
    check(hvd.grouped_allgather, [np.concatenate(stacked(size, *k)) for k in kinds])
    parts = [share(value, world) for value in sums]
    check(lambda xs: hvd.grouped_reducescatter(xs, op=hvd.Sum), parts)
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allgather([]) == []
    assert hvd.grouped_reducescatter([]) == []


def test_uneven_rows_and_splits(world, run: Run) -> None:
    rank, size = world.rank, world.size
    xs = [draw(r, (2 * r, 3)) for r in range(size)]
    same(run(lambda x: hvd.allgather(x, name="uneven"), xs[rank]), np.concatenate(xs))
    for n in range(2 * size + 1):
        part = run(lambda x: hvd.reducescatter(x, op=hvd.Sum), draw(rank, (n, 2)))
        same(part, share(total(size, (n, 2)), world))
    # Rank r sends r + q + 1 rows to rank q.
    splits = [rank + q + 1 for q in range(size)]
    x = tf.concat([tf.fill((n, 2), 10 * rank + q) for q, n in enumerate(splits)], 0)
    came = [r + rank + 1 for r in range(size)]
    rows = [np.full((n, 2), 10 * r + rank, np.int32) for r, n in enumerate(came)]
    for given in (splits, tf.constant(splits), tf.constant(splits, tf.int64)):
        out, received = run(lambda x, s=given: hvd.alltoall(x, s), x)
        same(out, np.concatenate(rows))
        same(received, np.array(came, np.int32))
    none = run(lambda x: hvd.alltoall(x, [0] * size), tf.zeros((0, 2)))
    assert none[0].shape == (0, 2)


def test_indexed_slices(world, run: Run) -> None:
    rank, size = world.rank, world.size
    values = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    indices = tf.constant([0, rank])

    def reduced(op: Any, **more: Any) -> Any:
        def reduce(values: Any, indices: Any) -> Any:
            slices = tf.IndexedSlices(values, indices, tf.constant([size, 2]))
            out = hvd.allreduce(slices, op=op, name="sparse", **more)
            assert isinstance(out, tf.IndexedSlices)
            return tf.convert_to_tensor(out), out.indices

        return run(reduce, values, indices)

    dense = np.zeros((size, 2), np.float32)
    for r in range(size):
        dense[0] += [1, 2]
        dense[r] += [3, 4]
    out, where = reduced(hvd.Sum)
    same(out, dense)
    same(where, np.array([i for r in range(size) for i in (0, r)], np.int32))
    np.testing.assert_allclose(reduced(hvd.Average)[0], dense / size, rtol=1e-6)
    with raises(NotImplementedError, "IndexedSlices", "sparse_as_dense"):
        reduced(hvd.Adasum)


def test_variables(world, run: Run) -> None:
    rank, size = world.rank, world.size
    v = tf.Variable(draw(rank, (3,)))
    same(run(lambda: hvd.allreduce(v, op=hvd.Sum)), total(size, (3,)))
    several = [v, tf.Variable([[rank]]), tf.Variable(rank + 0.5, dtype=tf.float64)]
    outs = run(lambda: hvd.broadcast_(several, size - 1, name="several"))
    for out, variable in zip(outs, several, strict=True):
        same(out, variable.numpy())
    same(v.read_value(), draw(size - 1, (3,)))
    assert several[1].numpy().tolist() == [[size - 1]]
    assert float(several[2]) == size - 0.5
    assert hvd.broadcast_([], 0) == []
    for value in (2.5, [2.5, 1.5], np.array([2.5])):
        doubled = np.asarray(value, np.float32) * size
        same(tf.cast(hvd.allreduce(value, op=hvd.Sum), tf.float32), doubled)


def test_gradients(world, run: Run) -> None:
    """The loss is a weighted sum: rank r multiplies row i by (r + 1) * (i + 1)."""
    rank, size = world.rank, world.size

    def gradient(function: Callable[[Any], Any]) -> Any:
        def of(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
                rows = tf.range(tf.shape(y)[0]) + 1
                loss = tf.reduce_sum(y * tf.cast(rows * (rank + 1), y.dtype))
            return tape.gradient(loss, x)

        return run(of, tf.ones(2 * size))

    ranks, rows = np.arange(size) + 1.0, np.arange(2 * size) + 1.0
    sums = (ranks.sum() * rows).astype(np.float32)
    same(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), sums)
    near = np.testing.assert_allclose
    near(gradient(hvd.allreduce), sums / size, rtol=1e-6)
    near(gradient(lambda x: hvd.grouped_allreduce([x, x])[1]), sums / size, rtol=1e-6)
    # Horovod defines the gradient of allgather as this rank's rows of the average.
    first = sum(r + 1 for r in range(rank))  # rank r sends r + 1 rows
    mean = ranks.mean() * (np.arange(sum(range(size + 1))) + 1)
    expected = np.zeros(2 * size)
    expected[: rank + 1] = mean[first : first + rank + 1]
    near(gradient(lambda x: hvd.allgather(x[: rank + 1])), expected, rtol=1e-6)
    on_root = sums / size if rank == 1 else np.zeros(2 * size)
    near(gradient(lambda x: hvd.broadcast(x, 1)), on_root, rtol=1e-6)
    # Rank r sends its rows 2q and 2q + 1 to rank q, where they are rows 2r and 2r + 1.
    there = np.array(
        [(q + 1) * (2 * rank + i + 1) for q in range(size) for i in (0, 1)]
    )
    same(gradient(hvd.alltoall), there.astype(np.float32))
    same(gradient(lambda x: hvd.alltoall(x, [2] * size)[0]), there.astype(np.float32))
    parts = np.array([(q + 1) * (i + 1) for q in range(size) for i in (0, 1)])
    scattered = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum))
    same(scattered, (size * parts).astype(np.float32))
    same(gradient(hvd.reducescatter), parts.astype(np.float32))


def test_a_second_derivative(world, run: Run) -> None:
    def second(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(hvd.allreduce(x * x * x, op=hvd.Sum))
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    np.testing.assert_allclose(run(second, tf.ones(2)), [6.0 * world.size] * 2)


def test_rank_and_size_as_tensors(world, run: Run) -> None:
    outs = run(
        lambda: [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(name="here"),
            hvd.local_size_op(),
            hvd.size_op(process_set_id=0),
            hvd.process_set_included_op(),
            hvd.process_set_included_op(process_set_id=77),
        ]
    )
    expected = [world.rank, world.size, world.rank, world.size, world.size, 1, -2]
    assert [out.dtype for out in outs] == [tf.int32] * 7
    assert [int(out) for out in outs] == expected
    with raises(tf.errors.InvalidArgumentError, "no process set 77"):
        run(lambda: hvd.size_op(77))


def test_join_and_barrier(world, run: Run) -> None:
    rank, size = world.rank, world.size
    run(hvd.barrier)
    x = tf.ones((2 * size, 2))
    if rank < size - 1:
        same(run(lambda x: hvd.allreduce(x, op=hvd.Sum), x), (size - 1) * x.numpy())
        assert run(hvd.allgather, x).shape[0] == 2 * size * (size - 1)
    last = run(hvd.join)
    assert last.dtype == tf.int32
    assert int(last) in range(size)
    same(hvd.allreduce(tf.constant(1)), np.int32(1))


@pytest.mark.ranks(3)
def test_process_sets(world, run: Run) -> None:
    pair = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    x = tf.fill((2,), float(world.rank))
    try:
        sets = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
        assert sets == {0: [0, 1, 2], pair.process_set_id: [0, 2]}
        included = run(lambda: hvd.process_set_included_op(pair.process_set_id))
        assert int(included) == (world.rank != 1)
        assert int(run(lambda: hvd.size_op(pair.process_set_id))) == 2
        if world.rank == 1:
            for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter):
                with raises(tf.errors.InvalidArgumentError, "does not include"):
                    run(lambda x, f=call: f(x, process_set=pair), x)
        else:
            same(
                run(lambda x: hvd.allreduce(x, process_set=pair), x), np.float32([1, 1])
            )
            out = run(lambda x: hvd.allgather(x, process_set=pair), x)
            same(out, np.float32([0, 0, 2, 2]))
            out = run(lambda x: hvd.broadcast(x, 2, process_set=pair), x)
            same(out, np.float32([2, 2]))
            out = run(lambda x: hvd.alltoall(x, process_set=pair), x)
            same(out, np.float32([0, 2]))
            hvd.barrier(process_set=pair)
            with raises(ValueError, "root_rank is 1", "[0, 2]"):
                run(lambda x: hvd.broadcast(x, 1, process_set=pair), x)
    finally:
        hvd.remove_process_set(pair)
    with raises((tf.errors.InvalidArgumentError, ValueError), "not registered"):
        run(lambda x: hvd.allreduce(x, process_set=pair), x)
    pair.process_set_id = 77
    with raises(ValueError, "process set"):
        run(lambda x: hvd.allreduce(x, process_set=pair), x)


def test_ranks_that_disagree_raise_and_continue(world, run: Run) -> None:
    odd = world.rank % 2
    mismatch = tf.errors.FailedPreconditionError
    with raises(mismatch, "Mismatched shapes of allreduce 'grad'", "rank 1"):
        run(lambda x: hvd.allreduce(x, name="grad"), tf.ones((17, 2 + odd)))
    with raises(mismatch, "Mismatched shapes of allreduce"):
        run(hvd.allreduce, tf.ones((17, 23 * 57) if odd else (17, 23, 57)))
    with raises(mismatch, "Mismatched dtypes"):
        run(hvd.allreduce, tf.ones(3, tf.int32 if odd else tf.float32))
    for call in (hvd.allgather, hvd.reducescatter):
        with raises(mismatch, "Mismatched"):
            run(call, tf.ones((2, 2 + odd)))
        with raises(mismatch, "Mismatched dtypes"):
            run(call, tf.ones(2, tf.int32 if odd else tf.float32))
    with raises(mismatch, "Mismatched root ranks of broadcast"):
        run(lambda x: hvd.broadcast(x, odd), tf.ones(3))
    with raises(mismatch, "Mismatched shapes of broadcast"):
        run(lambda x: hvd.broadcast(x, 0), tf.ones(3 + odd))
    with raises(mismatch, "Mismatched reduce ops"):
        run(lambda x: hvd.allreduce(x, op=hvd.Max if odd else hvd.Sum), tf.ones(3))
    with raises(mismatch, "Mismatched numbers of tensors"):
        run(lambda x: hvd.grouped_allreduce([x] * (1 + odd), name="g"), tf.ones(3))
    same(run(lambda x: hvd.allreduce(x, op=hvd.Min), tf.ones(3)), np.ones(3, "f"))


def test_errors_are_also_ringjax_errors(world) -> None:
    with raises(Mismatch, "Mismatched shapes"):
        hvd.allreduce(tf.ones(1 + world.rank))
    with raises(HorovodInternalError, "Mismatched shapes"):
        hvd.allreduce(tf.ones(1 + world.rank))


def test_unsupported_values_are_refused(world, run: Run) -> None:
    x, as_argument_error = tf.ones(3), tf.errors.InvalidArgumentError
    with raises(as_argument_error, "ringjax.allreduce", "cannot be sent"):
        run(lambda: hvd.allreduce(tf.constant("text"), name="g"))
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with raises(as_argument_error, "without dimensions"):
            run(call, tf.constant(1.0))
    for root in (world.size, -1):
        with raises((as_argument_error, ValueError), f"root_rank is {root}"):
            run(lambda x, root=root: hvd.broadcast(x, root), x)
    with raises(TypeError, "root_rank must be an int"):
        run(lambda x: hvd.broadcast(x, 0.0), x)
    for splits in ([1] * (world.size + 1), [-1] * world.size, [4] * world.size):
        with raises(as_argument_error, "alltoall"):
            run(lambda x, s=splits: hvd.alltoall(x, s), tf.ones(world.size))
    with raises(as_argument_error, "alltoall"):
        run(hvd.alltoall, tf.ones(world.size + 1))
    with raises(ValueError, "op is 11"):
        run(lambda x: hvd.allreduce(x, op=11), x)
    with raises(TypeError, "prescale_factor must be a number"):
        run(lambda x: hvd.allreduce(x, prescale_factor=[2]), x)
    with raises(TypeError, "name must be a str"):
        run(lambda x: hvd.allreduce(x, name=7), x)
    with raises(TypeError, "process_set must be a ProcessSet"):
        run(lambda x: hvd.allreduce(x, process_set=[0]), x)
    same(run(lambda x: hvd.allreduce(x, op=hvd.Max), x), np.ones(3, "f"))
