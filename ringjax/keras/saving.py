"""load_model: loads a saved model and makes its optimizer distributed again."""

from __future__ import annotations

import itertools
import json
import types
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras

from ringjax.keras.keras_patches import reducer_of
from ringjax.keras.keras_types import Compressor, Model, Optimizer
from ringjax.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: object,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor = None,
    legacy_opts: bool = False,
) -> Model:
    """Loads a model as `keras.models.load_model` does, with a distributed optimizer.

    The optimizer's state is read from the file, whether the model was saved with a
    distributed optimizer or with a plain one.

    Args:
        filepath: a file ``.keras`` or ``.h5``.
        custom_optimizers: the program's own classes of optimizers.
        custom_objects: further classes and functions by their names. A function under
            the name of the optimizer's class makes the optimizer, distributed or not.
        compression: the form in which gradients are sent, see `Compression`.
        legacy_opts: accepted and ignored.

    Raises:
        ValueError: the file does not exist, or has no model.

    Example:
        >>> import keras, tempfile, ringjax.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model.keras")
        ...     type(hvd.load_model(f"{folder}/model.keras").optimizer).__name__
        'Adam'
    """
    objects: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects.update(custom_objects or {})
    name = _optimizer_class(filepath)
    if name is not None and isinstance(objects.get(name), types.FunctionType):
        objects[name] = _class_for(objects[name])
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if (values := _optimizer_values(filepath)) is not None:
        # Keras 3.15 loses the optimizer's state of HDF5 files, because it builds the
        # optimizer without variables.
        optimizer = type(optimizer).from_config(optimizer.get_config())
        optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, values, strict=False):
            variable.assign(value)
        _set_optimizer(model, optimizer)
    # The program's function may have made a distributed optimizer already.
    if reducer_of(optimizer) is None:
        optimizer = DistributedOptimizer(optimizer, compression=compression)
        _set_optimizer(model, optimizer)
    return model


def _set_optimizer(model: Model, optimizer: Optimizer) -> None:
    model.optimizer = optimizer
    model._compile_config.config["optimizer"] = optimizer


def _class_for(function: Callable[..., Optimizer]) -> type:
    """Returns a class whose method `from_config` calls `function`.

    Keras finds optimizers in a table of classes, and uses only this method of a class.
    """

    class FromFunction(keras.optimizers.Optimizer):
        @classmethod
        def from_config(
            cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
        ) -> Optimizer:
            return function(**config)

    return FromFunction


def _optimizer_class(filepath: object) -> str | None:
    """Returns the class name of a file's optimizer, or None if it has no optimizer."""
    if (file := _as_hdf5(filepath)) is not None:
        with file:
            training = json.loads(file.attrs.get("training_config") or "{}")
        config = training.get("optimizer_config")
    elif isinstance(filepath, str | Path) and zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as archive:
            training = json.loads(archive.read("config.json")).get("compile_config")
        config = (training or {}).get("optimizer")
    else:
        return None
    if not isinstance(config, dict):
        return None
    name = config.get("registered_name") or config.get("class_name")
    return str(name).rpartition(">")[2] if name else None


def _optimizer_values(filepath: object) -> list[Any] | None:
    """Returns the optimizer's variables in an HDF5 file, or None if it has none."""
    if (file := _as_hdf5(filepath)) is None:
        return None
    with file:
        if "optimizer_weights" not in file:
            return None
        group = file["optimizer_weights"]
        # HDF5 limits the size of an attribute, so Keras cuts a long list of names into
        # the attributes weight_names0, weight_names1, ...
        parts = itertools.takewhile(
            group.attrs.__contains__,
            ["weight_names"]
            if "weight_names" in group.attrs
            else (f"weight_names{i}" for i in itertools.count()),
        )
        names = [name for part in parts for name in group.attrs[part]]
        return [group[name][()] for name in names]


def _as_hdf5(filepath: object) -> Any:
    """Opens an HDF5 file; returns None if it does not exist or has another format."""
    if not isinstance(filepath, str | Path) or not Path(filepath).is_file():
        return None
    import h5py

    return h5py.File(filepath) if h5py.is_hdf5(filepath) else None
