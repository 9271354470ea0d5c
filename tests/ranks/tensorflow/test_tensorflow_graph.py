"""Collectives in graphs: many at once, in loops, branches, threads and sessions."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.frameworks import in_ranks

from ringjax import errors

tf, hvd = in_ranks("tensorflow"), in_ranks("ringjax.tensorflow")
kernels = in_ranks("ringjax.tensorflow.kernels")

if "RINGJAX_RANK" in os.environ:
    # All graphs share two threads. The first operation of TensorFlow reads this.
    os.environ["TF_NUM_INTEROP_THREADS"] = "2"

pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("tensorflow")]


def rank_sum(world: Any) -> float:
    return float(sum(range(1, world.size + 1)))


def mine(world: Any, shape: Any = (3,)) -> Any:
    return tf.fill(shape, world.rank + 1.0)


def same(actual: Any, expected: Any) -> None:
    np.testing.assert_array_equal(actual, expected)


def test_many_on_two_threads_in_any_order(world) -> None:
    """Each rank starts with other operations, so none may block one of two threads."""
    count = 60
    order = list(range(count))
    random.Random(world.rank).shuffle(order)

    @tf.function(autograph=False)
    def many(x: Any) -> Any:
        outs: dict[int, Any] = {}
        for i in order:
            if i % 2:
                outs[i] = hvd.allreduce(x * i, op=hvd.Sum, name=f"many.{i}")
            else:
                outs[i] = hvd.allgather(x[: i % 4] + i, name=f"many.{i}")
        return [outs[i] for i in range(count)]

    for _ in range(3):
        outs = many(mine(world))
        for i, out in enumerate(outs):
            if i % 2:
                same(out, np.full(3, rank_sum(world) * i, np.float32))
            else:
                parts = [np.full(min(i % 4, 3), r + 1.0) for r in range(world.size)]
                same(out, np.concatenate(parts) + i)


def test_operations_do_not_wait_for_each_other(world) -> None:
    """An operation starts before earlier operations of the graph have ended."""
    started = []

    def record(x: np.ndarray) -> np.ndarray:
        started.append(time.monotonic())
        return x

    @tf.function(autograph=False)
    def both(x: Any) -> Any:
        slow = hvd.allreduce(x, name="slow")  # the last rank submits "slow" last
        fast = hvd.allreduce(x + 1, op=hvd.Sum, name="fast")
        return slow, tf.numpy_function(record, [fast], tf.float32)

    last = world.rank == world.size - 1

    @tf.function(autograph=False)
    def late(x: Any) -> Any:
        fast = hvd.allreduce(x + 1, op=hvd.Sum, name="fast")
        with tf.control_dependencies([tf.numpy_function(record, [fast], tf.float32)]):
            return hvd.allreduce(tf.identity(x), name="slow"), fast

    # If "fast" waited for "slow" on the other ranks, the last rank would hang.
    (late if last else both)(mine(world))
    assert len(started) == 1


def test_loops(world) -> None:
    @tf.function
    def ordered(x: Any) -> Any:
        for _ in tf.range(40):
            x = hvd.allreduce(x, op=hvd.Average, name="in.order") + 1.0
        return x

    mean = rank_sum(world) / world.size
    np.testing.assert_allclose(ordered(mine(world)), np.full(3, mean + 40), rtol=1e-5)

    @tf.function
    def independent(x: Any) -> Any:
        total = tf.zeros_like(x)
        for i in tf.range(40):
            total += hvd.allreduce(x * tf.cast(i, x.dtype), op=hvd.Sum)
        return total

    for _ in range(2):
        same(independent(mine(world)), np.full(3, rank_sum(world) * 780, np.float32))

    @tf.function
    def derived(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = hvd.allreduce(y * 2.0, op=hvd.Sum)
        return tape.gradient(y, x)

    same(derived(mine(world)), np.full(3, (2.0 * world.size) ** 3, np.float32))


def test_branches(world) -> None:
    @tf.function
    def choose(x: Any, which: Any) -> Any:
        if which > 0:
            return hvd.allreduce(x, op=hvd.Sum)
        return hvd.broadcast(x, 0)

    same(choose(mine(world), tf.constant(1)), np.full(3, rank_sum(world), np.float32))
    same(choose(mine(world), tf.constant(0)), np.ones(3, np.float32))

    @tf.function
    def derived(x: Any, which: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = choose(x * x, which)
        return tape.gradient(y, x)

    expected = 2.0 * (world.rank + 1) * world.size
    same(derived(mine(world), tf.constant(1)), np.full(3, expected, np.float32))


def test_functions_in_functions(world) -> None:
    """One line of source code makes several concurrent operations of other shapes."""

    @tf.function(reduce_retracing=False)
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x: Any) -> Any:
        with tf.name_scope("scope"):
            scoped = inner(x)
        return [scoped, inner(x[:2]), inner(x[:1]), inner(x), inner(scoped)]

    for _ in range(2):
        first, *others, last = outer(mine(world))
        same(first, np.full(3, rank_sum(world), np.float32))
        for n, out in zip((2, 1, 3), others, strict=True):
            same(out, np.full(n, rank_sum(world), np.float32))
        same(last, np.full(3, rank_sum(world) * world.size, np.float32))
    v = tf.Variable(mine(world))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(inner(v) * 2.0)
    same(tape.gradient(loss, v), np.full(3, 2.0 * world.size, np.float32))


def test_names_and_scopes(world) -> None:
    """In a graph, a name includes its name scope, except with `ignore_name_scope`."""
    x, odd = mine(world), world.rank % 2

    @tf.function
    def scoped(x: Any) -> Any:
        with tf.name_scope(f"of_rank_{odd}"):
            return hvd.allreduce(x, op=hvd.Sum, name="bare", ignore_name_scope=True)

    same(scoped(x), np.full(3, rank_sum(world), np.float32))

    @tf.function
    def in_scope(x: Any) -> Any:
        with tf.name_scope("here"):
            return hvd.allreduce(x, op=hvd.Sum, name="a:0")

    # An eager operation has no name scope, so it must use the complete name.
    name = "here/a:0"
    out = hvd.allreduce(x, op=hvd.Sum, name=name) if odd else in_scope(x)
    same(out, np.full(3, rank_sum(world), np.float32))


def test_static_shapes_are_inferred(world) -> None:
    seen: list[Any] = []

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def record_shapes(x: Any) -> Any:
        reduced, (rows, count) = hvd.allreduce(x), hvd.alltoall(x, [1] * world.size)
        outs = [reduced, hvd.allgather(x), hvd.reducescatter(x), rows, count]
        seen[:] = [out.shape.as_list() for out in [*outs, hvd.rank_op()]]
        return outs

    for rows in (world.size, world.size):
        record_shapes(mine(world, (rows, 4)))
    assert seen == [[None, 4]] * 4 + [[None], []]


def test_a_failure_leaks_nothing(world) -> None:
    """Operations of a failed graph do not disturb later graphs."""

    @tf.function
    def fails(x: Any) -> Any:
        good = [hvd.allreduce(x, op=hvd.Sum, name=f"good.{i}") for i in range(8)]
        with tf.control_dependencies(good):  # all ranks start these operations first
            return hvd.allreduce(tf.ones(1 + world.rank), name="bad")

    for _ in range(3):
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            fails(mine(world))
        original = errors.translate(caught.value)
        assert isinstance(original, hvd.HorovodInternalError)
        assert "Mismatched shapes of allreduce 'bad'" in str(original)
        hvd.barrier()

    @tf.function
    def works(x: Any) -> Any:
        return [hvd.allreduce(x, op=hvd.Sum, name=f"good.{i}") for i in range(8)]

    for out in works(mine(world)):
        same(out, np.full(3, rank_sum(world), np.float32))


def test_functions_in_threads(world) -> None:
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        @tf.function
        def reduce(x: Any) -> Any:
            return hvd.allreduce(x * i, op=hvd.Sum, name=f"thread.{i}")

        for _ in range(10):
            results[i] = reduce(mine(world))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        same(results[i], np.full(3, rank_sum(world) * i, np.float32))


def test_unused_results_are_still_computed(world) -> None:
    """Otherwise a rank that uses a result would wait for ranks that do not."""

    @tf.function
    def unused(x: Any) -> Any:
        out = hvd.allreduce(x, op=hvd.Sum, name="unused")
        hvd.barrier()
        return out if world.rank == 0 else x

    unused(mine(world))


def test_graphs_and_sessions_of_tensorflow_1(world) -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None])
        first = hvd.allreduce(x, op=hvd.Sum)
        group = hvd.grouped_allreduce([first * i for i in range(30)])
        (slope,) = tf.gradients(first, x)
        wrong = hvd.allreduce(x, name="wrong")
        with tf.compat.v1.Session() as session:
            values = np.arange(3.0)
            outs = session.run([*group, hvd.rank_op()], {x: values})
            for i, out in enumerate(outs[:30]):
                np.testing.assert_allclose(out, world.size * values * i, rtol=1e-6)
            assert outs[30] == world.rank
            same(session.run(slope, {x: values}), [world.size] * 3)
            with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
                session.run(wrong, {x: np.ones(1 + world.rank)})


def test_a_session_with_one_thread_does_not_deadlock(world) -> None:
    order = list(range(40))
    random.Random(world.rank).shuffle(order)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        outs: dict[int, Any] = {}
        for i in order:
            call = hvd.allgather if i % 4 == 0 else hvd.broadcast
            more = {"root_rank": i % 2} if i % 4 else {}
            outs[i] = call(mine(world, (1,)) * i, name=f"session.{i}", **more)
        wrong = hvd.allreduce(tf.ones(1 + world.rank), name="wrong.too")
        for _ in range(3):
            for i, out in session.run(outs).items():
                all_of = i * (np.arange(world.size) + 1.0)
                same(out, all_of[i % 2 : i % 2 + 1] if i % 4 else all_of)
            with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
                session.run([wrong, outs[1]])


@pytest.mark.parametrize("use_resource", [False, True])
def test_session_variables_are_updated_in_place(world, use_resource) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.Variable(mine(world, (n,)), use_resource=use_resource)
            for n in (1, 2)
        ]
        values = hvd.broadcast_(variables, root_rank=1)
        session.run(tf.compat.v1.global_variables_initializer())
        for found in (session.run(values), session.run(variables)):
            for value in found:
                same(value, np.full_like(value, 2.0))


def test_results_that_no_graph_collects_are_dropped(world, monkeypatch) -> None:
    @tf.function(autograph=False)
    def fails(x: Any) -> Any:
        out = hvd.allreduce(x, name="fails")
        every = tf.compat.v1.get_default_graph().get_operations()
        with tf.control_dependencies([n for n in every if n.type == "RingjaxStart"]):
            slow = tf.numpy_function(lambda: time.sleep(0.2), [], [])
            with tf.control_dependencies([slow]):
                tf.debugging.Assert(False, ["fails"])
        return out

    if world.rank == 0:
        time.sleep(0.5)  # the graphs of other ranks fail before the operation ends
    with pytest.raises(tf.errors.InvalidArgumentError, match="fails"):
        fails(mine(world))
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        hvd.allreduce(mine(world), name="not.taken")
        session.run([n for n in graph.get_operations() if n.type == "RingjaxStart"])
    assert kernels.pending_count() > 0
    monkeypatch.setattr(kernels, "_RESULT_TIMEOUT", -1.0)
    deadline = time.monotonic() + 20
    while kernels.pending_count() and time.monotonic() < deadline:
        kernels.drop_abandoned()
        time.sleep(0.01)
    assert kernels.pending_count() == 0
    same(hvd.allreduce(mine(world), op=hvd.Sum, name="fails"), [rank_sum(world)] * 3)
