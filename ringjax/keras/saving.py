"""load_model: saved models, with their optimizers distributed again."""

from __future__ import annotations

import itertools
import json
import types
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from ringjax.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model as `keras.models.load_model` does, with a distributed optimizer.

    The optimizer's state is that of the file, whether the model was saved with a
    distributed optimizer or with a plain one.

    Args:
        filepath: a file ``.keras`` or ``.h5``.
        custom_optimizers: the program's own classes of optimizers.
        custom_objects: further classes and functions by their names. Under the name of
            the optimizer's class also a function that makes one, distributed or not.
        compression: what gradients travel as, see `Compression`.
        legacy_opts: accepted and ignored.

    Raises:
        ValueError: no such file, or not a model.

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
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects.update(custom_objects or {})
    name = _optimizer_class(filepath)
    if name is not None and isinstance(objects.get(name), types.FunctionType):
        objects[name] = _made_by(objects[name])
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if (values := _optimizer_values(filepath)) is not None:
        # Keras (3.15) has built it for no variables, and so has lost its state.
        optimizer = type(optimizer).from_config(optimizer.get_config())
        optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, values, strict=False):
            variable.assign(value)
        _set_optimizer(model, optimizer)
    # Keras has put a LossScaleOptimizer around one that was made by the program.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "_reducer", None) is None:
        optimizer = DistributedOptimizer(optimizer, compression=compression)
        _set_optimizer(model, optimizer)
    return model


def _set_optimizer(model: Any, optimizer: Any) -> None:
    model.optimizer = optimizer
    model._compile_config.config["optimizer"] = optimizer


def _made_by(function: Any) -> type[Any]:
    """A class as Keras wants one, whose objects a function makes."""

    class Made(keras.optimizers.Optimizer):
        """Never made itself."""

        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
            """Calls the function."""
            return function(**config)

    return Made


def _optimizer_class(filepath: Any) -> str | None:
    """The name of the class of the optimizer in a file, None if there is none."""
    if (file := _as_hdf5(filepath)) is not None:
        with file:
            found = json.loads(file.attrs.get("training_config") or "{}")
        found = found.get("optimizer_config")
    elif isinstance(filepath, str | Path) and zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as archive:
            found = json.loads(archive.read("config.json")).get("compile_config")
        found = (found or {}).get("optimizer")
    else:
        return None
    if not isinstance(found, dict):
        return None
    name = found.get("registered_name") or found.get("class_name")
    return str(name).rpartition(">")[2] if name else None


def _optimizer_values(filepath: Any) -> list[Any] | None:
    """The optimizer's variables in an HDF5 file, None if there are none."""
    if (file := _as_hdf5(filepath)) is None:
        return None
    with file:
        if "optimizer_weights" not in file:
            return None
        group = file["optimizer_weights"]
        # A long list of names is cut into several.
        parts = itertools.takewhile(
            group.attrs.__contains__,
            ["weight_names"]
            if "weight_names" in group.attrs
            else (f"weight_names{i}" for i in itertools.count()),
        )
        names = [name for part in parts for name in group.attrs[part]]
        return [group[name][()] for name in names]


def _as_hdf5(filepath: Any) -> Any:
    """The opened file, None if it is another kind."""
    if not isinstance(filepath, str | Path) or not Path(filepath).is_file():
        return None
    import h5py

    return h5py.File(filepath) if h5py.is_hdf5(filepath) else None
