"""Applies functions to all leaves of a state, with and without JAX.

This module flattens lists, tuples and dicts. If the program uses JAX, `jax_leaves`
flattens values whose types are registered with JAX, such as optax's named tuples. Every
other value is a leaf. `leaf.py` converts leaves to bytes.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringjax.control.objects import is_named_callable

if TYPE_CHECKING:
    from ringjax.elastic.jax_leaves import JaxNode

Attributes = dict[str, Any]  # the attributes of a state by name
_SCALARS = str | bytes | int | float | complex


def jax_part() -> Any:
    """Returns `ringjax.elastic.jax_leaves`, or None if JAX has not been imported."""
    if "jax" not in sys.modules:
        return None
    return importlib.import_module("ringjax.elastic.jax_leaves")


def is_jax(value: object) -> bool:
    """Returns whether `value` is an array of JAX."""
    part = jax_part()
    return part is not None and bool(part.is_array(value))


def node(value: object) -> JaxNode | None:
    """Flattens `value` by JAX. Returns None if `value` is a scalar or a leaf."""
    if value is None or isinstance(value, _SCALARS):
        return None
    part = jax_part()
    if part is None or part.is_array(value):
        return None
    found: JaxNode | None = part.node(value)
    return found


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the structure of `value` with `leaf` applied to every leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(mapped(item, leaf) for item in value)
    if kind is dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    inner = node(value)
    if inner is None:
        return leaf(value)
    return inner.rebuild([mapped(child, leaf) for child in inner.children])


def merged(value: Any, other: Any, leaf: Callable[[Any, Any], Any]) -> Any:
    """Returns the structure of `value` with `leaf` applied to pairs of leaves.

    Entries of dicts are matched by key, in any order.

    Raises:
        ValueError: `other` has another structure.
    """
    kind = type(value)
    if kind is dict and isinstance(other, dict) and value.keys() == other.keys():
        return {key: merged(item, other[key], leaf) for key, item in value.items()}
    if (kind is list or kind is tuple) and len(value) == len(other):
        return kind(merged(*pair, leaf) for pair in zip(value, other, strict=True))
    inner = node(value)
    if inner is None and kind not in (dict, list, tuple):
        return leaf(value, other)
    counterpart = node(other)
    if inner is None or counterpart is None or inner.names != counterpart.names:
        raise ValueError(f"a {kind.__name__} and a {type(other).__name__} differ")
    pairs = zip(inner.children, counterpart.children, strict=True)
    return inner.rebuild([merged(*pair, leaf) for pair in pairs])


def leaves(value: object) -> list[Any]:
    """Returns all leaves, in the order in which `mapped` visits them."""
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(value, collect)
    return found


def jax_arrays(value: object) -> list[Any]:
    """Returns the leaves that are arrays of JAX."""
    part = jax_part()
    if part is None:
        return []
    return [leaf for leaf in leaves(value) if part.is_array(leaf)]


def kept(value: Any, *, copied: bool) -> Any:
    """Returns a snapshot of `value`, which later changes of `value` do not affect.

    Containers, and leaves that programs change in place, are copied. JAX's arrays are
    immutable, so the snapshot shares them, unless `copied` is true because the program
    may donate them.
    """
    part = jax_part()

    def keep(leaf: Any) -> Any:
        if part is not None and part.is_array(leaf):
            return part.copy_of(leaf) if copied and not part.is_deleted(leaf) else leaf
        in_place = isinstance(leaf, set | bytearray) or hasattr(leaf, "__dlpack__")
        # Horovod copies an object of another type only if a container holds the object.
        if (leaf is value and not in_place) or is_named_callable(leaf):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except TypeError:  # objects with a lock, a file or the like cannot be copied
            return leaf

    return mapped(value, keep)
