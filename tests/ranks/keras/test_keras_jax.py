"""ringjax.keras on JAX: all of tests/support/keras_*_checks.py, on two ranks.

All checks run on JAX, because its train steps are pure functions, in which most
mistakes show. The other backends run the checks of their adapters (keras_smoke.py). Two
ranks suffice because ringjax.keras has no code for three or more ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.keras_callback_checks import *  # noqa: F403
from support.keras_checks import *  # noqa: F403
from support.keras_checks import build
from support.keras_fit_checks import *  # noqa: F403
from support.keras_parameter_checks import *  # noqa: F403

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.launch("keras-jax"),
    pytest.mark.ranks(2, env={"KERAS_BACKEND": "jax"}),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(120),
]


def test_the_reduction_is_part_of_the_compiled_step(world, keras, hvd) -> None:
    import jax

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model = build(keras, optimizer)
    optimizer.build(model.trainable_variables)
    values = [v.value for v in model.trainable_variables]
    state = [v.value for v in optimizer.variables]
    gradients = [jax.numpy.full(v.shape, float(world.rank)) for v in values]
    step = jax.jit(optimizer.stateless_apply)
    text = step.lower(state, gradients, values).as_text()
    assert text.count("ringjax_run") == 1  # all gradients are in one call
    new, _ = step(state, gradients, values)
    for one, before in zip(new, values, strict=True):
        expected = np.asarray(before) - 0.25 * (world.size - 1)
        np.testing.assert_allclose(one, expected, atol=1e-6)
