"""Tests of ringjax.keras for every backend of Keras.

Each file in tests/ranks/keras/ chooses a backend and imports tests from this file. Only
the ranks import Keras; the pytest that launches the ranks does not. keras_smoke.py
lists the tests that run on all backends; the other tests run on one backend.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys

import numpy as np
import pytest

ROWS, IN, OUT = 12, 4, 2


@pytest.fixture
def keras(world):
    """Imports Keras without other backends and without scikit-learn.

    Importing TensorFlow and scikit-learn takes longer than most of the tests.
    """
    del world
    sys.modules.setdefault("sklearn", None)
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        sys.modules.setdefault("tensorflow", None)
    return importlib.import_module("keras")


@pytest.fixture
def hvd(keras):
    del keras
    return importlib.import_module("ringjax.keras")


def all_rows(size: int):
    """Returns the data of all ranks, with equally many rows for each rank."""
    draw = np.random.default_rng(7)
    shape = ROWS * size
    x = draw.normal(size=(shape, IN)).astype("float32")
    return x, draw.normal(size=(shape, OUT)).astype("float32")


def local_part(world, array, batch: int):
    """Returns this rank's part of every batch."""
    parts = array.reshape(-1, world.size, batch, array.shape[-1])
    return parts[:, world.rank].reshape(-1, array.shape[-1])


def build(keras, optimizer, seed: int = 0, layers=(), **options):
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(3, activation="tanh"), *layers]
    model = keras.Sequential([keras.Input((IN,)), *hidden, keras.layers.Dense(OUT)])
    model.compile(optimizer, keras.losses.MeanSquaredError(), **options)
    return model


def fit(model, x, y, batch: int, epochs: int = 1, **options):
    plain = {"shuffle": False, "verbose": 0}
    return model.fit(x, y, batch_size=batch, epochs=epochs, **plain, **options)


def weights(model):
    return [np.asarray(w) for w in model.get_weights()]


def assert_close(model, other, tolerance: float = 2e-6) -> None:
    for one, two in zip(weights(model), weights(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)


def equal_on_all_ranks(world, model) -> bool:
    from ringjax import eager

    everyone = eager.allgather_object([w.tobytes() for w in weights(model)])
    return all(one == everyone[0] for one in everyone)


def apply_gradients(world, keras, optimizer, passes: int = 1):
    """Applies gradients 1 + rank and 10 * (1 + rank) to two variables that are zero.

    Returns the negated new values of the variables, and the variables.
    """
    variables = [keras.Variable(np.zeros(n, "float32"), name=f"v{n}") for n in (3, 2)]
    for _ in range(passes):
        gradients = [
            keras.ops.full(v.shape, (1.0 + world.rank) * 10**i)
            for i, v in enumerate(variables)
        ]
        optimizer.apply(gradients, variables)
    found = [-np.asarray(keras.ops.convert_to_numpy(v)) for v in variables]
    assert all((row == row[0]).all() for row in found)
    return [float(row[0]) for row in found], variables


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "mean"),
        ({"compression": "fp16"}, "mean"),
        ({"compression": "bf16"}, "mean"),
        ({"gradient_predivide_factor": 4.0}, "mean"),
        ({"op": "Sum"}, "sum"),
        ({"groups": 2, "sparse_as_dense": True}, "mean"),
        ({"groups": 1}, "mean"),
        ({"backward_passes_per_step": 2}, "twice"),
        (
            {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
            "mean",
        ),
        ({"name": "other"}, "mean"),
    ],
    ids=str,
)
def test_options(world, keras, hvd, options, expected) -> None:
    options = dict(options)
    for name, home in (("compression", hvd.Compression), ("op", hvd)):
        if name in options:
            options[name] = getattr(home, options[name])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    passes = options.get("backward_passes_per_step", 1)
    found, _ = apply_gradients(world, keras, optimizer, passes)
    mean = (world.size + 1) / 2
    value = {"mean": mean, "sum": mean * world.size, "twice": 2 * mean}[expected]
    assert found == pytest.approx([value, 10 * value])


def test_custom_compression(world, keras, hvd) -> None:
    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor * 0.5, "context"

        @staticmethod
        def decompress(tensor, context):
            assert context == "context"
            return tensor * 2.0

    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(sgd, compression=Halved)
    mean = (world.size + 1) / 2
    assert apply_gradients(world, keras, optimizer)[0] == pytest.approx(
        [mean, 10 * mean]
    )


def test_groups_of_variables(world, keras, hvd) -> None:
    variables = [keras.Variable(np.zeros(n, "float32")) for n in (3, 2, 4)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), groups=[variables[1:]]
    )
    mine = [
        keras.ops.full(v.shape, float(world.rank + n)) for n, v in enumerate(variables)
    ]
    optimizer.apply(mine, variables)
    for n, variable in enumerate(variables):
        expected = -(world.size - 1) / 2 - n
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected)
    with pytest.raises(ValueError, match="groups should be"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=variables)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), groups=[variables[:2], variables[:1]]
    )
    with pytest.raises(ValueError, match="can only appear once in groups"):
        optimizer.apply(mine, variables)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("scale", [True, False])
def test_local_layers(world, keras, hvd, passes, scale) -> None:
    layers = [keras.layers.Dense(1) for _ in range(2)]
    for layer in layers:
        layer.build((None, 2))
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0),
        local_layers=layers[0],
        backward_passes_per_step=passes,
        average_aggregated_gradients=True,
        scale_local_gradients=scale,
    )
    variables = [v for layer in layers for v in layer.trainable_weights]
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    for _ in range(passes):
        mine = [keras.ops.full(v.shape, float(world.rank)) for v in variables]
        optimizer.apply(mine, variables)
    own = world.rank / world.size if scale else world.rank
    for i, (variable, start) in enumerate(zip(variables, before, strict=True)):
        moved = start - keras.ops.convert_to_numpy(variable)
        expected = own if i < 2 else (world.size - 1) / 2
        np.testing.assert_allclose(moved, expected, atol=1e-6, err_msg=str(i))
    with pytest.raises(ValueError, match=r"must be of type keras\.layers\.Layer"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[1])


def test_custom_training_loop(world, keras, hvd) -> None:
    """Calls `apply` outside of compiled steps, and `apply_gradients` as in Keras 2."""
    variable = keras.Variable(np.zeros(3, "float32"), name="v")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    mine = keras.ops.convert_to_tensor(np.full(3, 1.0 + world.rank, "float32"))
    optimizer.apply([mine], [variable])
    mean = (world.size + 1) / 2
    np.testing.assert_allclose(np.asarray(keras.ops.convert_to_numpy(variable)), -mean)
    optimizer.apply_gradients([(mine, variable)], skip_gradients_aggregation=True)
    expected = -mean - 1 - world.rank
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected)
    reduced = optimizer._allreduce([mine, None], [variable, variable])
    assert reduced[1] is None
    optimizer.apply_gradients([(reduced[0], variable)])  # not reduced again
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected - mean)


def test_process_sets(world, keras, hvd) -> None:
    chosen = hvd.add_process_set([0, world.size - 1])
    try:
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), process_set=chosen
        )
        mine = keras.ops.convert_to_tensor(np.full(2, float(world.rank), "float32"))
        optimizer.apply([mine], [variable])
        expected = (world.size - 1) / 2 if chosen.included() else world.rank
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -expected)
    finally:
        hvd.remove_process_set(chosen)


def test_configurations(world, keras, hvd) -> None:
    del world
    plain = keras.optimizers.Adam(0.25, beta_1=0.5, name="mine")
    optimizer = hvd.DistributedOptimizer(plain)
    config = optimizer.get_config()
    assert config == plain.get_config()
    for copy in (optimizer.from_config(config), type(optimizer).from_config(config)):
        assert copy.get_config() == config and hasattr(copy, "register_local_var")
    assert type(optimizer).__name__ == "Adam"
    restored = keras.optimizers.get(keras.optimizers.serialize(optimizer))
    assert isinstance(restored, keras.optimizers.Adam)
    assert restored.get_config() == config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": 3}, "op must be Average, Sum or Adasum"),
        ({"op": 1, "gradient_predivide_factor": 2.0}, "op != Average"),
        ({"gradient_predivide_factor": 0.0}, "must be > 0"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"groups": -1}, "groups should be a non-negative integer"),
        ({"groups": True}, "groups should be a non-negative integer"),
    ],
)
def test_bad_arguments(world, keras, hvd, options, text) -> None:
    del world
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)


def test_wrong_optimizers_are_refused(world, keras, hvd) -> None:
    del world
    with pytest.raises(TypeError, match="is a str, expected one of Keras"):
        hvd.DistributedOptimizer("sgd")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(TypeError, match="a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(TypeError, match="a DistributedOptimizer already"):
        hvd.DistributedOptimizer(scaled)
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), num_groups=2)


def test_collectives_on_values(world, keras, hvd) -> None:
    def array(x):
        return np.asarray(keras.ops.convert_to_numpy(x))

    total = sum(range(world.size))
    assert array(hvd.allreduce(float(world.rank), name="a")) == total / world.size
    assert array(hvd.allreduce(np.int32(world.rank), op=hvd.Sum)) == total
    with pytest.warns(DeprecationWarning, match="use op=Average or op=Sum"):
        assert array(hvd.allreduce(1.0, average=False)) == world.size
    packed = hvd.allreduce([1.0, 2.0], compression=hvd.Compression.fp16)
    assert array(packed).tolist() == [1.0, 2.0]
    scaled = hvd.allreduce(1.0, prescale_factor=2.0, postscale_factor=3.0, op=hvd.Max)
    assert array(scaled) == 6.0
    rows = np.full((world.rank + 1, 2), world.rank, "float32")
    assert array(hvd.allgather(rows)).shape == (total + world.size, 2)
    assert array(hvd.broadcast(float(world.rank), 1)) == 1.0
    mine = hvd.reducescatter(np.arange(2.0 * world.size, dtype="float32"))
    assert array(mine).tolist() == [2.0 * world.rank, 2.0 * world.rank + 1]
    with pytest.raises(ValueError, match="give only one"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


def check_names_and_arguments(module) -> None:
    """Compares names and arguments with those of Horovod."""
    optimizer = """optimizer name device_dense device_sparse compression sparse_as_dense
    gradient_predivide_factor op backward_passes_per_step average_aggregated_gradients
    """
    expected = {
        "DistributedOptimizer": f"{optimizer} num_groups groups process_set "
        "scale_local_gradients",
        "PartialDistributedOptimizer": f"{optimizer} groups process_set local_layers "
        "scale_local_gradients",
        "allreduce": "value name average prescale_factor postscale_factor op "
        "compression",
        "allgather": "value name",
        "broadcast": "value root_rank name",
        "reducescatter": "value name op",
        "broadcast_global_variables": "root_rank",
        "load_model": "filepath custom_optimizers custom_objects compression "
        "legacy_opts",
        "callbacks.BroadcastGlobalVariablesCallback": "root_rank device "
        "local_variables",
        "callbacks.MetricAverageCallback": "device",
        "callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch "
        "end_epoch staircase momentum_correction steps_per_epoch",
        "callbacks.LearningRateWarmupCallback": "initial_lr warmup_epochs "
        "momentum_correction steps_per_epoch verbose",
        "callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode "
        "save_freq",
        "elastic.KerasState": "model optimizer kwargs",
        "elastic.CommitStateCallback": "state batches_per_commit",
        "elastic.UpdateBatchStateCallback": "state",
        "elastic.UpdateEpochStateCallback": "state",
    }
    for name, arguments in expected.items():
        found = module
        for part in name.split("."):
            found = getattr(found, part)
        assert list(inspect.signature(found).parameters) == arguments.split(), name
    names = """init shutdown is_initialized rank size local_rank local_size
    cross_rank cross_size is_homogeneous start_timeline stop_timeline
    mpi_threads_supported
    mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built sycl_built Average Sum Adasum Min Max Product Compression
    ProcessSet
    global_process_set add_process_set remove_process_set"""
    assert not [name for name in names.split() if not hasattr(module, name)]


def test_names_and_arguments_match_horovod(hvd) -> None:
    check_names_and_arguments(hvd)
    assert hvd.Compression.none is not None
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        hvd.compress  # noqa: B018
