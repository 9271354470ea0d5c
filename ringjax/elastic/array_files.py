"""A state of JAX's trees and plain values as files: orbax for arrays, else JSON.

An attribute that holds an array is an orbax checkpoint of its own,
``orbax.checkpoint.PyTreeCheckpointer().restore("…/120/params")`` opens it. Keys of
jax.random are their data in it, empty arrays a zero, and an attribute that is nothing
but an array is a dict with the one entry ``value``.
"""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ringjax.control import objects
from ringjax.elastic import leaves, values
from ringjax.elastic.checkpointer import synced

_PLAIN = "plain.json"
_ENCODED = "ringjax.objects"  # what JSON cannot say, in the layout of that module


class ArrayFiles:
    """Lays out a `State`."""

    def prepared(self, committed: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Trees of numpy arrays, and the text of the plain values."""
        trees = {
            name: _wrapped(values.mapped(value, _Numbers(name).of))
            for name, value in committed.items()
            if _has_arrays(value)
        }
        if trees:
            _orbax()  # now, and not in the thread: an error that must be seen
        plain = {
            name: _plain(name, value)
            for name, value in committed.items()
            if name not in trees
        }
        return trees, json.dumps(plain, indent=1).encode()

    def write(self, folder: Path, prepared: tuple[dict[str, Any], bytes]) -> None:
        """Fills the folder."""
        trees, plain = prepared
        with synced(folder / _PLAIN) as file:
            file.write(plain)
        for name, tree in trees.items():
            with _orbax().PyTreeCheckpointer() as files:
                files.save(folder / name, tree)

    def read(self, folder: Path, present: dict[str, Any]) -> dict[str, Any]:
        """The attributes that both the files and the program have."""
        plain = json.loads((folder / _PLAIN).read_bytes())
        found = {
            name: _from_plain(value) for name, value in plain.items() if name in present
        }
        for name, value in present.items():
            if name not in found and (folder / name).is_dir():
                found[name] = _read_tree(folder / name, value)
        return found


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError(
            "ringjax.elastic.Checkpointer writes arrays with orbax: "
            'pip install "ringjax[checkpoint]"'
        ) from error


def _has_arrays(value: Any) -> bool:
    return any(
        isinstance(leaf, np.ndarray | np.generic) or values.is_jax(leaf)
        for leaf in values.leaves(value)
    )


def _wrapped(tree: Any) -> Any:
    return {"value": tree} if isinstance(tree, np.ndarray) else tree


class _Numbers:
    """The leaves of one attribute as numpy arrays that orbax writes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, leaf: Any) -> Any:
        """The array of a leaf; Python's numbers become arrays, too."""
        if leaf is None:
            return leaf
        if values.is_jax(leaf):
            data = values.jax_part().data_of(leaf)
        elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
            data = np.asarray(leaf)
        else:
            raise TypeError(
                f"ringjax.elastic: state.{self._name} has a {type(leaf).__name__} "
                "beside arrays, expected arrays and numbers only where one attribute "
                "is to be written to disk; put it into another attribute"
            )
        if not leaves.dtype_name(data.dtype) or data.dtype.kind in "SUmM":
            raise TypeError(
                f"ringjax.elastic: state.{self._name} has an array of dtype "
                f"{data.dtype}, which cannot be written to disk"
            )
        return data if data.size else np.zeros((), data.dtype)


def _read_tree(folder: Path, present: Any) -> Any:
    orbax = _orbax()
    template = _wrapped(values.mapped(present, _Numbers(folder.name).of))
    restore = values.mapped(
        template,
        lambda x: None if x is None else orbax.RestoreArgs(restore_type=np.ndarray),
    )
    with orbax.PyTreeCheckpointer() as files:
        read = files.restore(folder, item=template, restore_args=restore)
    tree = read["value"] if template is not present and _is_leaf(present) else read
    return values.merged(present, tree, lambda leaf, one: _like(leaf, one, folder))


def _is_leaf(value: Any) -> bool:
    return [*map(id, values.leaves(value))] == [id(value)]


def _like(leaf: Any, read: Any, folder: Path) -> Any:
    """The array as what the program has in that place."""
    if leaf is None:
        return None
    array, template = np.asarray(read), _Numbers(folder.name).of(leaf)
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


def _plain(name: str, value: Any) -> Any:
    try:
        if _same(json.loads(json.dumps(value, allow_nan=False)), value):
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


def _same(read: Any, value: Any) -> bool:
    """Whether JSON gives back the very types; a tuple would come back as a list."""
    if type(read) is not type(value):
        return False
    if isinstance(value, dict):
        pairs = ((read.get(key), item) for key, item in value.items())
        return read.keys() == value.keys() and all(_same(*pair) for pair in pairs)
    if isinstance(value, list):
        return all(map(_same, read, value))
    return bool(read == value)


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and [*value] == [_ENCODED]:
        return objects.decode(base64.b64decode(value[_ENCODED]))
    return value
