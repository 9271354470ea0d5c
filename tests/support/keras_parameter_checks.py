"""Tests of the check that all ranks have equal variables, for every backend of Keras.

tests/ranks/keras/ collects these tests; see tests/support/keras_checks.py.
"""

from __future__ import annotations

import os

from support.keras_checks import all_rows, build, fit, hvd, keras, local_part
from support.parameter_warnings import check_every, read_warnings, warning_of_rank_0

__all__ = [
    "hvd",
    "keras",
    "test_a_broadcast_after_the_first_step_causes_no_warning",
    "test_a_missing_broadcast_causes_one_warning",
    "test_each_optimizer_counts_its_own_steps",
    "test_the_parameter_check_can_be_off",
]

# With PyTorch, Keras compiles nothing. TensorFlow also has graphs without XLA.
COMPILE_OPTIONS = {
    "jax": [{"jit_compile": True}, {"run_eagerly": True}],
    "tensorflow": [{"jit_compile": on} for on in (True, False)]
    + [{"run_eagerly": True}],
    "torch": [{}],
}


def model_of(keras, hvd, seed: int = 0, **options):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    return build(keras, optimizer, seed=seed, **options)


def broadcast(model) -> None:
    from ringjax.keras.backends import backend

    backend().broadcast_variables([*model.weights, *model.optimizer.variables], 0)


def test_a_missing_broadcast_causes_one_warning(
    world, keras, hvd, capfd, monkeypatch
) -> None:
    check_every(monkeypatch, 2)
    x, y = (local_part(world, rows, 2) for rows in all_rows(world.size))
    for options in COMPILE_OPTIONS[os.environ["KERAS_BACKEND"]]:
        model = model_of(keras, hvd, **options)
        changed = model.trainable_variables[2]
        if world.rank == world.size - 1:
            changed.assign(changed + 1)
        fit(model, x, y, 2)  # six steps, three checks
        expected = warning_of_rank_0(world, 1, changed.path, world.size - 1)
        assert read_warnings(capfd) == expected, options
        broadcast(model)
        fit(model, x, y, 2)
        assert read_warnings(capfd) == [], options
        model.trainable_variables[0].assign_add(
            keras.ops.full(model.trainable_variables[0].shape, float(world.rank == 0))
        )
        fit(model, x[:4], y[:4], 2)
        # If the values of two ranks differ, the warning names rank 1, not rank 0.
        differing = 1 if world.size == 2 else 0
        path = model.trainable_variables[0].path
        expected = warning_of_rank_0(world, 13, path, differing)
        assert read_warnings(capfd) == expected, options


def test_a_broadcast_after_the_first_step_causes_no_warning(
    world, keras, hvd, capfd, monkeypatch
) -> None:
    check_every(monkeypatch, 2)
    x, y = (local_part(world, rows, 2) for rows in all_rows(world.size))
    for options in COMPILE_OPTIONS[os.environ["KERAS_BACKEND"]]:
        model = model_of(keras, hvd, seed=world.rank, **options)
        fit(model, x[:2], y[:2], 2)
        broadcast(model)
        fit(model, x, y, 2)
        assert read_warnings(capfd) == [], options


def test_each_optimizer_counts_its_own_steps(
    world, keras, hvd, capfd, monkeypatch
) -> None:
    check_every(monkeypatch, 1)
    x, y = (local_part(world, rows, 2) for rows in all_rows(world.size))
    models = [model_of(keras, hvd, seed=world.rank) for _ in range(2)]
    for model in models:  # the optimizers have the same name
        fit(model, x[:2], y[:2], 2)
    for model in models:
        broadcast(model)
    for model in models:
        fit(model, x[:4], y[:4], 2)
    assert read_warnings(capfd) == []


def test_the_parameter_check_can_be_off(world, keras, hvd, capfd, monkeypatch) -> None:
    check_every(monkeypatch, 0)
    x, y = (local_part(world, rows, 2) for rows in all_rows(world.size))
    for options in COMPILE_OPTIONS[os.environ["KERAS_BACKEND"]]:
        fit(model_of(keras, hvd, seed=world.rank, **options), x[:6], y[:6], 2)
    assert read_warnings(capfd) == []
