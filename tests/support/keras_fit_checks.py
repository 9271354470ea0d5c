"""Tests of `model.fit` with a distributed optimizer, for every backend of Keras.

tests/ranks/keras/ collects these tests; see tests/support/keras_checks.py.
"""

from __future__ import annotations

import pytest

from support.keras_checks import (
    ROWS,
    all_rows,
    assert_close,
    build,
    equal_on_all_ranks,
    fit,
    hvd,
    keras,
    local_part,
    weights,
)

__all__ = [
    "hvd",
    "keras",
    "test_a_model_of_more_than_160_variables",
    "test_fit_equals_one_process_on_the_whole_batch",
    "test_infinite_gradients_on_a_rank_skip_the_step_on_all",
    "test_several_passes_per_step",
]

OPTIMIZERS = {
    "momentum": lambda k: k.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "accumulated": lambda k: k.optimizers.SGD(
        0.2, gradient_accumulation_steps=2, clipnorm=0.2
    ),
    "scaled": lambda k: k.optimizers.LossScaleOptimizer(
        k.optimizers.Adam(0.05, weight_decay=0.01)
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fit_equals_one_process_on_the_whole_batch(world, keras, hvd, kind) -> None:
    x, y = all_rows(world.size)
    reference = build(keras, OPTIMIZERS[kind](keras))
    fit(reference, x, y, 2 * world.size, epochs=2)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](keras))
    assert isinstance(optimizer, type(OPTIMIZERS[kind](keras)))
    model = build(keras, optimizer, seed=world.rank)  # the broadcast makes them equal
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    mine = local_part(world, x, 2), local_part(world, y, 2)
    fit(model, *mine, 2, epochs=2, callbacks=callbacks)
    assert_close(model, reference)
    assert equal_on_all_ranks(world, model)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)


def test_a_model_of_more_than_160_variables(world, keras, hvd) -> None:
    class Many(keras.layers.Layer):
        def build(self, shape):
            self.parts = [self.add_weight(shape=(1,)) for _ in range(160)]

        def call(self, inputs):
            return inputs + keras.ops.sum(keras.ops.concatenate(self.parts))

    x, y = all_rows(world.size)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = build(keras, optimizer, layers=[Many()])
    assert len(model.trainable_variables) == 164
    before = weights(model)
    fit(model, local_part(world, x, 2), local_part(world, y, 2), 2)
    assert equal_on_all_ranks(world, model)
    assert any((a != b).any() for a, b in zip(before, weights(model), strict=True))


def test_several_passes_per_step(world, keras, hvd) -> None:
    x, y = all_rows(world.size)
    reference = build(keras, keras.optimizers.SGD(0.1))
    fit(reference, x, y, 4 * world.size)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    model = build(keras, optimizer)
    parts = local_part(world, x, 2), local_part(world, y, 2)
    fit(model, *parts, 2)
    assert_close(model, reference)
    assert int(model.optimizer.iterations) == ROWS // 2
    assert int(model.optimizer._agg_helper.counter) == 0
    fit(model, *(part[:2] for part in parts), 2)  # a pass without a step
    assert_close(model, reference)
    assert int(model.optimizer._agg_helper.counter) == 1
    assert int(model.optimizer.iterations) == ROWS // 2 + 1


def test_infinite_gradients_on_a_rank_skip_the_step_on_all(world, keras, hvd) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model = build(keras, optimizer)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = all_rows(world.size)
    mine = local_part(world, x, 2), local_part(world, y, 2)
    before = weights(model)
    if world.rank == world.size - 1:
        mine[1][:2] = 1e30  # in the first batch
    fit(model, *(part[:2] for part in mine), 2)
    assert all((a == b).all() for a, b in zip(before, weights(model), strict=True))
    scale = float(model.optimizer.dynamic_scale)
    assert scale == 2.0**14 and int(model.optimizer.iterations) == 0
    fit(model, *(part[2:4] for part in mine), 2)
    assert int(model.optimizer.iterations) == 1
    assert equal_on_all_ranks(world, model)
    assert any((a != b).any() for a, b in zip(before, weights(model), strict=True))
