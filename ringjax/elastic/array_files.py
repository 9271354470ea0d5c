"""Writes and reads the files of a checkpoint: arrays by orbax, other values as JSON.

Each attribute that contains an array is a separate orbax checkpoint, which
``orbax.checkpoint.PyTreeCheckpointer().restore("…/120/params")`` reads. In the files, a
key of jax.random is stored as its data, an empty array as a zero, and an attribute that
is a single array as a dict with the one entry ``value``.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

import numpy as np

from ringjax.control import objects
from ringjax.elastic import values
from ringjax.elastic.leaf import NUMPY_KINDS
from ringjax.elastic.values import Attributes

_PLAIN = "plain.json"
_ENCODED = "ringjax.objects"  # marks values that JSON cannot hold, in base64
_ORBAX_KINDS = "".join(set(NUMPY_KINDS) - set("SUmM"))


class CheckpointLayout(Protocol):
    """Reads and writes the files of a checkpoint, for one class of state."""

    def prepare(self, committed: Attributes) -> Any:
        """Returns the data that `write` needs, which training does not change.

        Raises:
            TypeError: the state contains an object that cannot be written.
        """

    def write(self, folder: Path, prepared: Any) -> None:
        """Writes files into the folder. The caller runs `write` in a thread."""

    def read(self, folder: Path, present: Attributes) -> Attributes:
        """Returns the attributes in the folder.

        Raises ValueError if the structure of an attribute differs from the structure in
        `present`, the current attributes.
        """


@contextlib.contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file for writing, and forces its data to the disk at the end."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


class ArrayFiles:
    """The checkpoint layout of a `State`."""

    def prepare(self, committed: Attributes) -> tuple[Attributes, bytes]:
        """Returns trees of numpy arrays by attribute, and the text of plain values."""
        trees = {
            name: _wrap(values.mapped(value, partial(_as_numpy, name)))
            for name, value in committed.items()
            if _has_arrays(value)
        }
        if trees:
            _orbax()  # if orbax is missing, raise the error here, not in the thread
        plain = {
            name: _to_json(name, value)
            for name, value in committed.items()
            if name not in trees
        }
        return trees, json.dumps(plain, indent=1).encode()

    def write(self, folder: Path, prepared: tuple[Attributes, bytes]) -> None:
        """Writes files into the folder."""
        trees, plain = prepared
        with synced(folder / _PLAIN) as file:
            file.write(plain)
        for name, tree in trees.items():
            with _orbax().PyTreeCheckpointer() as files:
                files.save(folder / name, tree)

    def read(self, folder: Path, present: Attributes) -> Attributes:
        """Returns the attributes that exist both in the files and in the program."""
        plain = json.loads((folder / _PLAIN).read_bytes())
        found = {
            name: _from_json(value) for name, value in plain.items() if name in present
        }
        for name, value in present.items():
            if name not in found and (folder / name).is_dir():
                found[name] = _read_tree(folder / name, value)
        return found


def _orbax() -> ModuleType:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError(
            "ringjax.elastic.Checkpointer writes arrays with orbax: "
            'pip install "ringjax[checkpoint]"'
        ) from error


def _has_arrays(value: object) -> bool:
    return any(
        isinstance(leaf, np.ndarray | np.generic) or values.is_jax(leaf)
        for leaf in values.leaves(value)
    )


def _wrap(tree: object) -> object:
    return {"value": tree} if isinstance(tree, np.ndarray) else tree


def _as_numpy(name: str, leaf: object) -> objects.Array | None:
    """Returns a leaf of the attribute `name` as an array that orbax can write."""
    if leaf is None:
        return None
    if values.is_jax(leaf):
        data = values.jax_part().data_of(leaf)
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        data = np.asarray(leaf)
    else:
        raise TypeError(
            f"ringjax.elastic: state.{name} has a {type(leaf).__name__} "
            "beside arrays, expected arrays and numbers only where one attribute "
            "is to be written to disk; put it into another attribute"
        )
    if not objects.dtype_name(data.dtype, _ORBAX_KINDS):
        raise TypeError(
            f"ringjax.elastic: state.{name} has an array of dtype "
            f"{data.dtype}, which cannot be written to disk"
        )
    return data if data.size else np.zeros((), data.dtype)


def _read_tree(folder: Path, present: object) -> object:
    orbax = _orbax()
    template = _wrap(values.mapped(present, partial(_as_numpy, folder.name)))
    restore = values.mapped(
        template,
        lambda x: None if x is None else orbax.RestoreArgs(restore_type=np.ndarray),
    )
    with orbax.PyTreeCheckpointer() as files:
        read = files.restore(folder, item=template, restore_args=restore)
    tree = read["value"] if template is not present and _is_leaf(present) else read
    return values.merged(present, tree, partial(_convert_like, folder))


def _is_leaf(value: object) -> bool:
    return [*map(id, values.leaves(value))] == [id(value)]


def _convert_like(folder: Path, leaf: Any, read: Any) -> Any:
    """Converts an array that was read to the type of the program's `leaf`."""
    template = _as_numpy(folder.name, leaf)
    if template is None:
        return None
    array = np.asarray(read)
    if array.shape != template.shape:
        raise ValueError(
            f"{folder} has an array of shape {list(array.shape)} where the program's "
            f"state.{folder.name} has {list(template.shape)}"
        )
    if values.is_jax(leaf):
        part = values.jax_part()
        if part.data_of(leaf).size == 0:
            return leaf
        return part.array_of(array.astype(template.dtype), *part.describe(leaf), leaf)
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.size == 0 else array.astype(leaf.dtype)
    if isinstance(leaf, np.generic):
        return array.astype(leaf.dtype)[()]
    return type(leaf)(array.item())


def _to_json(name: str, value: object) -> object:
    try:
        if _is_same(json.loads(json.dumps(value, allow_nan=False)), value):
            return value
    except (TypeError, ValueError):
        pass
    try:
        data = objects.encode(value)
    except TypeError as error:
        raise TypeError(
            f"ringjax.elastic: state.{name} cannot be written to disk: {error}"
        ) from None
    return {_ENCODED: base64.b64encode(data).decode()}


def _is_same(read: object, value: object) -> bool:
    """Returns whether values and types are equal: JSON turns tuples into lists."""
    if type(read) is not type(value):
        return False
    if isinstance(value, dict) and isinstance(read, dict):
        pairs = ((read.get(key), item) for key, item in value.items())
        return read.keys() == value.keys() and all(_is_same(*pair) for pair in pairs)
    if isinstance(value, list) and isinstance(read, list):
        return all(map(_is_same, read, value))
    return bool(read == value)


def _from_json(value: object) -> object:
    if isinstance(value, dict) and [*value] == [_ENCODED]:
        return objects.decode(base64.b64decode(value[_ENCODED]))
    return value
