"""Tests of callbacks, saved models and elastic training, for every backend of Keras.

tests/ranks/keras/ collects these tests; see tests/support/keras_checks.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.keras_checks import (
    ROWS,
    all_rows,
    assert_close,
    build,
    equal_on_all_ranks,
    fit,
    local_part,
    weights,
)


def local_rows(world, batch: int):
    x, y = all_rows(world.size)
    return local_part(world, x, batch), local_part(world, y, batch)


def recorder(keras, look):
    """Makes a callback that stores `look(model)` at the end of every batch."""

    class Recorder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(look(self.model))

    return Recorder()


def rate_of(model) -> float:
    return float(model.optimizer.learning_rate)


def test_broadcast_keeps_local_variables(world, keras, hvd) -> None:
    root = world.size - 1
    model = build(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    for variable in model.weights:
        variable.assign(np.full(variable.shape, float(world.rank), "float32"))
    make = hvd.callbacks.BroadcastGlobalVariablesCallback
    callback = make(root, local_variables=model.layers[0].weights)
    fit(model, *local_rows(world, 2), 2, callbacks=[callback])
    assert callback.broadcast_done
    for i, weight in enumerate(weights(model)):
        assert (weight == (world.rank if i < 2 else root)).all(), i
    one = make(0, local_variables=model.weights[0])
    assert [one._is_local(v) for v in model.weights[:2]] == [True, False]
    with pytest.raises(ValueError, match="All local variables must be of type"):
        make(0, local_variables=[model.weights[0], "kernel"])


def test_broadcast_reaches_the_optimizer(world, keras, hvd, tmp_path) -> None:
    """Rank 0 loads a model that has made some steps; other ranks build a new model."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model = build(keras, optimizer, seed=world.rank)
    fit(model, *local_rows(world, 2), 2)
    if world.rank == 0:
        model.save(tmp_path / "model.keras")
        model = hvd.load_model(tmp_path / "model.keras")
    else:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9))
        model = build(keras, optimizer, seed=9)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit(model, *local_rows(world, 2), 2, callbacks=callbacks)
    assert equal_on_all_ranks(world, model)
    assert rate_of(model) == pytest.approx(0.1)
    assert int(model.optimizer.iterations) == 2 * ROWS // 2


def test_metrics_are_averaged(world, keras, hvd) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model = build(keras, optimizer, metrics=["mae"])
    x, y = local_rows(world, ROWS)
    own = model.evaluate(x, y, verbose=0, return_dict=True)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    history = fit(
        model, x, y, ROWS, callbacks=callbacks, validation_data=(x, y)
    ).history
    expected = {
        name: float(hvd.allreduce(float(value), name=f"expected.{name}"))
        for name, value in own.items()
    }
    for name, value in expected.items():
        assert history[name] == [pytest.approx(value, rel=1e-5)]
        assert history[f"val_{name}"] == [pytest.approx(value, rel=1e-5)]


def test_learning_rate_warmup(world, keras, hvd, capsys) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.3))
    model = build(keras, optimizer)
    rates = recorder(keras, rate_of)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.6, warmup_epochs=2, verbose=1)
    steps = ROWS // 4
    history = fit(model, *local_rows(world, 4), 4, epochs=3, callbacks=[warmup, rates])
    done = np.minimum(np.arange(1, 3 * steps + 1) / (2 * steps), 1)
    expected = 0.6 / world.size * (1 + done * (world.size - 1))
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"][1:], 0.6, rtol=1e-6)
    said = (
        "Epoch 2: finished gradual learning rate warmup to 0.6."
        in capsys.readouterr().out
    )
    assert said == (world.rank == 0)


def test_schedules(world, keras, hvd) -> None:
    model = build(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(1.0)))
    rates = recorder(keras, rate_of)
    schedule = hvd.callbacks.LearningRateScheduleCallback
    callbacks = [
        schedule(0.8, multiplier=0.5, start_epoch=0, end_epoch=2),
        schedule(0.8, lambda epoch: 0.1 * epoch, 2, 3, staircase=False),
        schedule(0.8, multiplier=1e-2, start_epoch=3),
    ]
    fit(model, *local_rows(world, 6), 6, epochs=5, callbacks=[*callbacks, rates])
    expected = [0.8, 0.8, 0.4, 0.4, 0.16, 0.2, 0.8, 0.8, 0.008, 0.008]
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`initial_lr` is required"):
        schedule(None, 1.0)
    stepless = schedule(0.1, lambda epoch: 1.0, staircase=False)
    stepless.set_params({"steps": None})
    with pytest.raises(ValueError, match="specify the steps_per_epoch"):
        stepless.on_train_begin()


def test_momentum_is_corrected(world, keras, hvd) -> None:
    """The reference scales its velocities when the learning rate changes."""
    x, y = all_rows(world.size)
    whole = build(keras, keras.optimizers.SGD(0.1, momentum=0.9))
    first, second = (slice(0, 2 * world.size), slice(2 * world.size, 4 * world.size))
    fit(whole, x[first], y[first], 2 * world.size)
    whole.optimizer.learning_rate = 0.02
    for velocity in whole.optimizer.momentums:
        velocity.assign(velocity * 0.2)
    fit(whole, x[second], y[second], 2 * world.size)
    model = build(
        keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    )
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1.0 if epoch == 0 else 0.2, staircase=False
    )
    mine = local_part(world, x, 2), local_part(world, y, 2)
    fit(model, *(part[:4] for part in mine), 2, callbacks=[schedule])
    assert_close(model, whole)
    assert model.optimizer.momentum == 0.9


@pytest.mark.parametrize("kind", ["Adam", "LossScaleOptimizer"])
@pytest.mark.filterwarnings("ignore:.*HDF5.*")
def test_loading_a_saved_model(world, keras, hvd, tmp_path, kind) -> None:
    plain = keras.optimizers.Adam(0.05)
    if kind == "LossScaleOptimizer":
        plain = keras.optimizers.LossScaleOptimizer(plain)
    model = build(keras, hvd.DistributedOptimizer(plain, backward_passes_per_step=1))
    mine = local_rows(world, 2)
    fit(model, *mine, 2)
    loaded = {}
    for ending in ("keras", "h5"):
        path = tmp_path / f"model.{ending}"
        model.save(path)
        one = loaded[ending] = hvd.load_model(str(path))
        assert type(one.optimizer).__name__ == kind
        assert hasattr(one.optimizer, "register_local_var")
        assert_close(one, model, 0)
        pairs = zip(model.optimizer.variables, one.optimizer.variables, strict=True)
        for pair in pairs:
            np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, pair))
        without = keras.models.load_model(path)
        assert not hasattr(without.optimizer, "register_local_var")
    for one in (model, *loaded.values()):
        fit(one, *mine, 2)
        assert_close(one, model, 0)
        assert equal_on_all_ranks(world, one)


def test_a_model_saved_with_several_passes_loads_without_ringjax(
    world, keras, hvd, tmp_path
) -> None:
    optimizer = keras.optimizers.Adam(0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    model = build(keras, optimizer)
    fit(model, *local_rows(world, 2), 2)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert int(plain.iterations) == ROWS // 2
    assert len(plain.variables) < len(model.optimizer.variables)
    again = hvd.load_model(tmp_path / "model.keras").optimizer
    assert int(again.iterations) == ROWS // 2


def test_a_saved_model_with_a_custom_optimizer(world, keras, hvd, tmp_path) -> None:
    class Own(keras.optimizers.RMSprop):
        pass

    model = build(keras, hvd.DistributedOptimizer(Own(0.05)))
    fit(model, *local_rows(world, 2), 2)
    model.save(tmp_path / "model.keras")
    given = {
        "optimizers": {"custom_optimizers": [Own]},
        "objects": {"custom_objects": {"Own": Own}},
        "function": {
            "custom_objects": {"Own": lambda **c: hvd.DistributedOptimizer(Own(**c))}
        },
    }
    for how, options in given.items():
        loaded = hvd.load_model(tmp_path / "model.keras", **options)
        assert isinstance(loaded.optimizer, Own), how
        assert hasattr(loaded.optimizer, "register_local_var"), how
        assert rate_of(loaded) == rate_of(model), how
        assert int(loaded.optimizer.iterations) == ROWS // 2, how


def test_best_model_checkpoint(world, keras, hvd, tmp_path) -> None:
    model = build(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="set its attribute `filepath`"):
        fit(model, *local_rows(world, 2), 2, callbacks=[best])
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    best.filepath = str(tmp_path / "best.weights.h5")
    fit(model, *local_rows(world, 2), 2, callbacks=[best])
    model.load_weights(best.filepath)


def test_keras_state_saves_restores_and_syncs(world, keras, hvd) -> None:
    model = build(keras, hvd.DistributedOptimizer(keras.optimizers.Adam()), world.rank)
    state = hvd.elastic.KerasState(model, batch=20 + world.rank, epoch=world.rank)
    with pytest.raises(ValueError, match="Model must be built first"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(2)]))
    state.sync()
    assert (state.batch, state.epoch) == (20, 0)
    assert_close(model, build(keras, "sgd"), 0)
    first = weights(model)
    fit(model, *local_rows(world, 2), 2)
    state.batch = 21
    state.restore()
    assert state.batch == 20 and int(model.optimizer.iterations) == 0
    assert all((a == b).all() for a, b in zip(first, weights(model), strict=True))
    fit(model, *local_rows(world, 2), 2)
    state.commit()
    kept = weights(model)
    fit(model, *local_rows(world, 2), 2)
    state.restore()
    assert all((a == b).all() for a, b in zip(kept, weights(model), strict=True))
    assert int(model.optimizer.iterations) == ROWS // 2


def test_fit_continues_after_a_failure(world, keras, hvd) -> None:
    x, y = local_rows(world, 2)
    model = build(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    resets, seen, commits = [], [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((state.epoch, state.batch))
            if len(seen) == 4:
                raise hvd.HorovodInternalError("made up")

    class Counting(hvd.elastic.CommitStateCallback):
        def commit(self):
            commits.append((state.epoch, state.batch))
            super().commit()

    @hvd.elastic.run
    def train(state):
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Counting(state, batches_per_commit=2),
            Failing(),
        ]
        first = 0 if state.epoch or state.batch == 0 else state.batch + 1
        data = x[2 * first :], y[2 * first :]
        fit(model, *data, 2, callbacks=callbacks)
        fit(model, x, y, 2, callbacks=callbacks)

    train(state)
    assert resets == [world.size]
    assert (state.epoch, state.batch) == (2, 0)
    steps = ROWS // 2
    assert len(commits) == steps + 2  # after every other batch and after both epochs
    assert seen[:4] == [(0, i) for i in range(4)]
    # Training continues after the last commit, so the first four batches are not
    # repeated.
    assert seen[4:] == [(0, i) for i in range(steps - 4)] + [
        (1, i) for i in range(steps)
    ]
    assert equal_on_all_ranks(world, model)
    assert int(model.optimizer.iterations) == 2 * steps


def test_callbacks_skip_the_finished_batches_of_an_epoch(world, keras, hvd) -> None:
    del world
    model = build(keras, hvd.DistributedOptimizer(keras.optimizers.SGD()))
    state = hvd.elastic.KerasState(model, batch=4, epoch=3)
    callback = hvd.elastic.UpdateBatchStateCallback(state)
    epochs = hvd.elastic.UpdateEpochStateCallback(state)
    callback.set_params({"steps": 6})
    for epoch, steps in enumerate((2, 6)):
        callback.on_epoch_begin(epoch)
        assert callback.params["steps"] == steps
        callback.on_train_batch_end(1)
        assert state.batch == 1
        for one in (callback, epochs):
            one.on_epoch_end(epoch)
        assert (state.batch, state.epoch) == (0, 4 + epoch)
    epochs.on_train_begin()
    epochs.on_epoch_end(0)
    assert state.epoch == 6
