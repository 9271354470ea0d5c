"""ringjax.keras on TensorFlow: only its adapter, on two ranks (see test_keras_jax)."""

from __future__ import annotations

import numpy as np
import pytest
from support.keras_checks import (
    all_rows,
    build,
    check_names_and_arguments,
    equal_on_all_ranks,
    fit,
    local_part,
)
from support.keras_smoke import *  # noqa: F403

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.launch("keras-tensorflow"),
    pytest.mark.ranks(2, env={"KERAS_BACKEND": "tensorflow"}),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("passes", [1, 2])
def test_xla_compiles_the_step_if_possible(world, keras, hvd, passes) -> None:
    x, y = all_rows(world.size)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=passes
    )
    model = build(keras, optimizer, jit_compile=True)
    mine = local_part(world, x, 2), local_part(world, y, 2)
    if passes == 1:
        fit(model, *mine, 2)
    else:
        with pytest.warns(UserWarning, match="in a branch; this model trains with"):
            fit(model, *mine, 2)
    assert model.jit_compile == (passes == 1)
    assert equal_on_all_ranks(world, model)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients(world, keras, hvd, passes, dense) -> None:
    import tensorflow as tf

    variable = tf.Variable(np.ones((4, 2), "float32"))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        sparse_as_dense=dense,
        backward_passes_per_step=passes,
    )

    @tf.function
    def step():
        pairs = optimizer._compute_gradients(
            lambda: tf.gather(variable, [world.rank]), [variable]
        )
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=True)

    if passes > 1 and not dense:
        with pytest.raises(ValueError, match="IndexedSlices are not supported"):
            step()
        return
    for _ in range(passes):
        step()
    expected = np.ones((4, 2))
    expected[: world.size] -= passes / world.size
    np.testing.assert_allclose(variable, expected)
    assert int(optimizer.iterations) == passes


def test_gradients_of_a_tape(world, keras, hvd) -> None:
    import tensorflow as tf

    variable = tf.Variable(float(world.rank))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        loss = variable * variable
    pairs = optimizer._compute_gradients(loss, [variable], tape=tape)
    assert float(pairs[0][0]) == world.size - 1
    with pytest.raises(ValueError, match="`tape` is required"):
        optimizer._compute_gradients(loss, [variable])


def test_names_and_arguments_of_the_module_for_tensorflow(world, keras) -> None:
    import ringjax.tensorflow.keras

    check_names_and_arguments(ringjax.tensorflow.keras)
