"""Distributed optimizers of TensorFlow 1: eagerly, in functions and in graphs.

They must train like one process with all data. test_keras_*.py tests optimizers of
Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from support.tensorflow_net import (
    Net,
    adasum,
    batch,
    close,
    expected_gradients,
    in_mode,
    mean,
)

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("tensorflow")]
# Tests that need no third rank run on two ranks, because tracing is slow.
RANKS = pytest.mark.ranks(3)


def legacy(tf: Any, kind: str) -> Any:
    train = tf.compat.v1.train
    return {
        "sgd": lambda: train.GradientDescentOptimizer(0.1),
        "momentum": lambda: train.MomentumOptimizer(0.1, 0.9),
        "adam": lambda: train.AdamOptimizer(0.05),
    }[kind]()


def trained(
    tf: Any, kind: str, steps: int, passes: int, op: Callable, ranks: Any
) -> Any:
    """Trains in one process with the gradients of all ranks; returns the variables."""
    net, optimizer = Net(tf), legacy(tf, kind)
    for step in range(steps):
        parts = [
            expected_gradients(tf, net, ranks, op, step * passes + i)
            for i in range(passes)
        ]
        pairs = [
            (tf.constant(np.sum(one, axis=0), "float32"), variable)
            for one, variable in zip(
                zip(*parts, strict=True), net.variables, strict=True
            )
            if one[0] is not None
        ]
        optimizer.apply_gradients(pairs)
    return [variable.numpy() for variable in net.variables]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
def test_optimizers_of_tensorflow_1(world, tf, hvd, mode: str) -> None:
    for kind, passes in [("sgd", 1), ("momentum", 2), ("adam", 1), ("adam", 2)]:
        expected = trained(tf, kind, 2, passes, mean, range(world.size))
        options = {"backward_passes_per_step": passes, "sparse_as_dense": True}
        graph = tf.Graph()
        with graph.as_default() if mode == "graph" else nullcontext():
            net = Net(tf)
            optimizer = hvd.DistributedOptimizer(legacy(tf, kind), **options)
            if mode == "graph":
                rows = tf.compat.v1.placeholder(tf.int32, [3])
                train = optimizer.minimize(net.loss(rows))
                start = [
                    tf.compat.v1.global_variables_initializer(),
                    tf.compat.v1.local_variables_initializer(),
                ]
                with tf.compat.v1.Session() as session:
                    session.run(start)
                    for step in range(2 * passes):
                        session.run(train, {rows: batch(world.rank, step)})
                    found = session.run(net.variables)
            else:

                def step(rows: Any, net: Net = net, optimizer: Any = optimizer) -> None:
                    loss = lambda: net.loss(rows)  # noqa: E731
                    optimizer.minimize(loss, var_list=net.variables)

                run = in_mode(tf, mode, step)
                for number in range(2 * passes):
                    run(tf.constant(batch(world.rank, number)))
                found = [variable.numpy() for variable in net.variables]
        close(tf, found, expected, 1e-4)


@RANKS
def test_steps_are_counted_while_gradients_are_added_up(world, tf, hvd) -> None:
    class Adding(tf.compat.v1.train.Optimizer):
        def __init__(self) -> None:
            super().__init__(name="adding", use_locking=False)
            self.variable = tf.compat.v1.get_variable("x", initializer=[0.0])

        def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
            gradient = tf.IndexedSlices(
                tf.constant([float(world.rank)]), tf.constant([0]), tf.constant([1])
            )
            return [(gradient, self.variable)]

        def _resource_apply_dense(self, grad: Any, handle: Any) -> Any:
            return handle.assign_add(grad)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = hvd.DistributedOptimizer(
            Adding(),
            backward_passes_per_step=4,
            average_aggregated_gradients=True,
            sparse_as_dense=True,
        )
        count = tf.compat.v1.train.get_or_create_global_step()
        pairs = optimizer.compute_gradients()
        with tf.control_dependencies([gradient for gradient, _ in pairs]):
            before = count + 0
        with tf.control_dependencies([before]):
            train = optimizer.apply_gradients(pairs, global_step=count)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.local_variables_initializer())
        for step in range(10):
            assert session.run([before, train])[0] == step
            value = session.run(optimizer._optimizer.variable)[0]
            assert value == (step + 1) // 4 * (world.size - 1) / 2
            assert session.run(optimizer._agg_helper.counter) == (step + 1) % 4


@RANKS
@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
def test_local_variables_of_an_optimizer(world, tf, hvd, mode: str) -> None:
    def build() -> Any:
        variables = [tf.Variable(1.0), tf.Variable(1.0)]
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(plain)
        optimizer.register_local_var(variables[1])
        return variables, optimizer

    def minimize(variables: Any, optimizer: Any) -> Any:
        loss = lambda: (variables[0] + variables[1]) * (world.rank + 1.0)  # noqa: E731
        if mode == "graph":
            return optimizer.minimize(loss(), var_list=variables)
        return optimizer.minimize(loss, var_list=variables)

    if mode == "graph":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variables, optimizer = build()
            train = minimize(variables, optimizer)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train)
            found = session.run(variables)
    else:
        variables, optimizer = build()
        in_mode(tf, mode, lambda: minimize(variables, optimizer) and None)()
        found = [variable.numpy() for variable in variables]
    want = [1 - (world.size + 1) / 2, 1 - (world.rank + 1) / world.size]
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
def test_adasum_combines_parameter_changes(world, tf, hvd, mode: str) -> None:
    passes = 2
    starts = [variable.numpy() for variable in Net(tf).variables]
    ends = []
    for rank in range(world.size):  # the local step of each rank
        net, optimizer = Net(tf), legacy(tf, "momentum")
        for step in range(passes):
            pairs = net.gradients(tf.constant(batch(rank, step)))
            optimizer.apply_gradients(
                [p for p in zip(pairs, net.variables, strict=True) if p[0] is not None]
            )
        ends.append([variable.numpy().astype("float64") for variable in net.variables])
    expected = [
        start + adasum([end - start for end in row])
        for start, row in zip(starts, zip(*ends, strict=True), strict=True)
    ]
    options = {"op": hvd.Adasum, "backward_passes_per_step": passes}
    if mode == "graph":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            net = Net(tf)
            optimizer = hvd.DistributedOptimizer(legacy(tf, "momentum"), **options)
            rows = tf.compat.v1.placeholder(tf.int32, [3])
            train = optimizer.minimize(net.loss(rows))
            session.run(tf.compat.v1.global_variables_initializer())
            for step in range(passes):
                session.run(train, {rows: batch(world.rank, step)})
            found = session.run(net.variables)
    else:
        net = Net(tf)
        optimizer = hvd.DistributedOptimizer(legacy(tf, "momentum"), **options)

        def one(rows: Any) -> None:
            optimizer.minimize(lambda: net.loss(rows), var_list=net.variables)

        run = in_mode(tf, mode, one)
        for step in range(passes):
            run(tf.constant(batch(world.rank, step)))
        found = [variable.numpy() for variable in net.variables]
    close(tf, found, expected, 1e-4)


@pytest.mark.ranks(2)
def test_reference_variables_of_tensorflow_1(world, tf, hvd) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        start = [float(world.rank + 1)]
        variables = [
            tf.compat.v1.get_variable(name, initializer=start, use_resource=False)
            for name in ("mean", "adasum")
        ]
        train = []
        for variable, op in zip(variables, (hvd.Average, hvd.Adasum), strict=True):
            plain = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
            optimizer = hvd.DistributedOptimizer(plain, op=op)
            loss = variable * variable
            train.append(optimizer.minimize(loss, var_list=[variable]))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train)
        # The ranks step by 0.2 and 0.4. Adasum of parallel steps is their mean.
        found = np.concatenate(session.run(variables))
        np.testing.assert_allclose(found, [start[0] - 0.3, start[0] - 0.3], rtol=1e-6)
        session.run(hvd.broadcast_global_variables(1))
        np.testing.assert_allclose(session.run(variables[0]), [1.7], rtol=1e-6)
