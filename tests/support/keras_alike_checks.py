"""Tests of the check that ranks have equal variables, the same on every backend.

tests/ranks/keras/ collects them, as those of tests/support/keras_checks.py.
"""

from __future__ import annotations

import os

from support.keras_checks import build, fit, hvd, keras, rows_of, share
from support.parameters import by_the_first, look_every, said

__all__ = [
    "hvd",
    "keras",
    "test_each_optimizer_counts_its_own_steps",
    "test_no_look_if_it_is_off",
    "test_the_broadcast_after_the_first_step_is_in_time",
    "test_who_forgets_the_broadcast_is_told_once",
]

# PyTorch compiles nothing here; TensorFlow also has graphs without XLA.
WAYS = {
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


def test_who_forgets_the_broadcast_is_told_once(
    world, keras, hvd, capfd, monkeypatch
) -> None:
    look_every(monkeypatch, 2)
    x, y = (share(world, rows, 2) for rows in rows_of(world.size))
    for options in WAYS[os.environ["KERAS_BACKEND"]]:
        model = model_of(keras, hvd, **options)
        changed = model.trainable_variables[2]
        if world.rank == world.size - 1:
            changed.assign(changed + 1)
        fit(model, x, y, 2)  # six steps, three checks
        expected = by_the_first(world, 1, changed.path, world.size - 1)
        assert said(capfd) == expected, options
        broadcast(model)
        fit(model, x, y, 2)
        assert said(capfd) == [], options
        model.trainable_variables[0].assign_add(
            keras.ops.full(model.trainable_variables[0].shape, float(world.rank == 0))
        )
        fit(model, x[:4], y[:4], 2)
        expected = by_the_first(world, 13, model.trainable_variables[0].path, 0)
        if world.size == 2:  # with one vote each, the first rank counts as right
            expected = by_the_first(world, 13, model.trainable_variables[0].path, 1)
        assert said(capfd) == expected, options


def test_the_broadcast_after_the_first_step_is_in_time(
    world, keras, hvd, capfd, monkeypatch
) -> None:
    look_every(monkeypatch, 2)
    x, y = (share(world, rows, 2) for rows in rows_of(world.size))
    for options in WAYS[os.environ["KERAS_BACKEND"]]:
        model = model_of(keras, hvd, seed=world.rank, **options)
        fit(model, x[:2], y[:2], 2)
        broadcast(model)
        fit(model, x, y, 2)
        assert said(capfd) == [], options


def test_each_optimizer_counts_its_own_steps(
    world, keras, hvd, capfd, monkeypatch
) -> None:
    look_every(monkeypatch, 1)
    x, y = (share(world, rows, 2) for rows in rows_of(world.size))
    models = [model_of(keras, hvd, seed=world.rank) for _ in range(2)]
    for model in models:  # the optimizers have the same name
        fit(model, x[:2], y[:2], 2)
    for model in models:
        broadcast(model)
    for model in models:
        fit(model, x[:4], y[:4], 2)
    assert said(capfd) == []


def test_no_look_if_it_is_off(world, keras, hvd, capfd, monkeypatch) -> None:
    look_every(monkeypatch, 0)
    x, y = (share(world, rows, 2) for rows in rows_of(world.size))
    for options in WAYS[os.environ["KERAS_BACKEND"]]:
        fit(model_of(keras, hvd, seed=world.rank, **options), x[:6], y[:6], 2)
    assert said(capfd) == []
