"""DistributedGradientTape on several ranks equals a tape on the data of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.tensorflow_net import (
    Net,
    adasum,
    batch,
    close,
    dense,
    expected_gradients,
    in_mode,
    mean,
    total,
)

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("tensorflow")]
# Tests that need no third rank run on two ranks, because tracing is slow.
RANKS = pytest.mark.ranks(3)
MODES = pytest.mark.parametrize("mode", ["eager", "function"])


@pytest.mark.ranks(2)
@MODES
def test_a_tape_averages_the_gradients_of_all_ranks(world, tf, hvd, mode: str) -> None:
    net = Net(tf)
    ways = [
        ({}, mean, 1e-5),
        ({"op": hvd.Sum}, total, 1e-5),
        ({"op": hvd.Adasum, "sparse_as_dense": True}, adasum, 1e-4),
        ({"sparse_as_dense": True}, mean, 1e-5),
        ({"gradient_predivide_factor": 4.0, "sparse_as_dense": True}, mean, 1e-5),
        ({"compression": hvd.Compression.fp16, "sparse_as_dense": True}, mean, 2e-3),
        ({"groups": 1, "sparse_as_dense": True}, mean, 1e-5),
        ({"groups": 3}, mean, 1e-5),
        ({"groups": [[net.bias, net.table], [net.spare]]}, mean, 1e-5),
        ({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, mean, 1e-5),
    ]
    for options, op, rtol in ways:

        def step(rows: Any, options: dict = options) -> Any:
            return net.gradients(
                rows, lambda tape: hvd.DistributedGradientTape(tape, **options)
            )

        found = in_mode(tf, mode, step)(tf.constant(batch(world.rank)))
        sparse = not options.get("sparse_as_dense")
        assert isinstance(found[0], tf.IndexedSlices) == sparse, options
        close(tf, found, expected_gradients(tf, net, range(world.size), op), rtol)


@RANKS
@MODES
def test_training_with_a_tape_equals_training_with_all_data(
    world, tf, hvd, mode
) -> None:
    import keras

    net, plain = Net(tf, seed=world.rank), Net(tf, seed=0)
    hvd.broadcast_variables(net.variables, root_rank=0)
    optimizer = keras.optimizers.Adam(0.05)
    reference = keras.optimizers.Adam(0.05)

    def step(rows: Any) -> None:
        def wrap(tape: Any) -> Any:  # with sparse gradients, Adam skips some rows
            return hvd.DistributedGradientTape(tape, sparse_as_dense=True)

        gradients = net.gradients(rows, wrap)
        optimizer.apply_gradients(
            [p for p in zip(gradients, net.variables, strict=True) if p[0] is not None]
        )

    run = in_mode(tf, mode, step)
    for number in range(4):
        expected = expected_gradients(tf, plain, range(world.size), mean, number)
        run(tf.constant(batch(world.rank, number)))
        reference.apply_gradients(
            [
                (tf.constant(g, "float32"), v)
                for g, v in zip(expected, plain.variables, strict=True)
                if g is not None
            ]
        )
    close(tf, net.variables, [v.numpy() for v in plain.variables], 1e-4)


@RANKS
@MODES
def test_local_sources_keep_their_own_gradients(world, tf, hvd, mode: str) -> None:
    net = Net(tf)
    mine = net.gradients(tf.constant(batch(world.rank)))
    expected = expected_gradients(tf, net, range(world.size), mean)
    for scaled in (True, False):

        def step(rows: Any, scaled: bool = scaled) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = net.loss(rows)
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
            tape.register_local_source(net.table)
            tape.register_local_source(net.bias)
            found = tape.gradient(loss, net.variables)
            pairs = tape.get_local_and_global_gradients(loss, net.variables)
            return found, [[gradient for _, gradient in half] for half in pairs]

        found, (local, shared) = in_mode(tf, mode, step)(tf.constant(batch(world.rank)))
        size = world.size if scaled else 1
        want = list(expected)
        want[0], want[2] = dense(tf, mine[0]) / size, dense(tf, mine[2]) / size
        close(tf, found, want, 1e-5)
        close(tf, local, [want[0], want[2]], 1e-5)
        close(tf, shared, [want[1], want[3]], 1e-5)


@RANKS
def test_local_layers_keep_their_own_gradients(world, tf, hvd) -> None:
    import keras

    constant = keras.initializers.Constant(world.rank + 1.0)
    layers = [keras.layers.Dense(2, kernel_initializer=constant) for _ in range(2)]
    model = keras.Sequential([keras.layers.Input((3,)), *layers])
    for local in ([], layers[0], layers[:1], layers):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(tf.ones((1, 3))))
        mine = tape.gradient(loss, model.trainable_weights)
        everybody = [np.mean(hvd.allgather_object(g.numpy()), axis=0) for g in mine]
        partial = hvd.PartialDistributedGradientTape(tape, local_layers=local)
        found = partial.gradient(loss, model.trainable_weights)
        count = {id(layers[0]): 2}.get(id(local), 2 * len(np.atleast_1d(local)))
        want = [
            m.numpy() / world.size if i < count else all_
            for i, (m, all_) in enumerate(zip(mine, everybody, strict=True))
        ]
        close(tf, found, want, 1e-5)
    with pytest.raises(ValueError, match="must be of tf.keras.layers.Layer type"):
        hvd.PartialDistributedGradientTape(tape, local_layers=["dense"])


@pytest.mark.ranks(3)
@MODES
def test_gradients_of_a_process_set(world, tf, hvd, mode: str) -> None:
    chosen = hvd.add_process_set([0, 2])
    net = Net(tf)

    def step(rows: Any) -> Any:
        return net.gradients(
            rows, lambda tape: hvd.DistributedGradientTape(tape, process_set=chosen)
        )

    found = in_mode(tf, mode, step)(tf.constant(batch(world.rank)))
    ranks = [0, 2] if chosen.included() else [1]
    close(tf, found, expected_gradients(tf, net, ranks, mean), 1e-5)
    hvd.remove_process_set(chosen)


@RANKS
@MODES
def test_many_gradients_of_many_dtypes(world, tf, hvd, mode: str) -> None:
    kinds = ["float32", "float64", "float16", "bfloat16"]
    variables = [tf.Variable(tf.ones([i % 3 + 1], kinds[i % 4])) for i in range(60)]

    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = [
                tf.reduce_sum(tf.cast(v, "float32")) * i
                for i, v in enumerate(variables)
            ]
            loss = tf.add_n(parts) * factor
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    found = in_mode(tf, mode, step)(tf.constant(world.rank + 1.0))
    for i, (gradient, variable) in enumerate(zip(found, variables, strict=True)):
        assert gradient.dtype == variable.dtype
        value = i * (world.size + 1) / 2
        np.testing.assert_allclose(gradient.numpy().astype("float64"), value, rtol=1e-2)


@RANKS
@MODES
def test_two_tapes_at_once_are_independent(world, tf, hvd, mode: str) -> None:
    x, y = tf.Variable(1.0), tf.Variable(1.0)

    def step(rank: Any) -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            one, two = x * (rank + 1.0), y * (rank + 10.0)
        first, second = map(hvd.DistributedGradientTape, (first, second))
        return first.gradient(one, [x])[0], second.gradient(two, [y])[0]

    run = in_mode(tf, mode, step)
    for _ in range(10):
        one, two = run(tf.constant(float(world.rank)))
        middle = (world.size - 1) / 2
        np.testing.assert_allclose([one, two], [middle + 1, middle + 10])


@RANKS
@MODES
def test_ranks_that_disagree_raise_and_continue(world, tf, hvd, mode: str) -> None:
    variable = tf.Variable(tf.ones(3 + world.rank))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    with pytest.raises(tf.errors.FailedPreconditionError, match="shape"):
        in_mode(tf, mode, step)()
    net = Net(tf)
    found = net.gradients(tf.constant(batch(world.rank)), hvd.DistributedGradientTape)
    close(tf, found, expected_gradients(tf, net, range(world.size), mean), 1e-5)
