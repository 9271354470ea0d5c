"""What a state may hold, taken apart and put together: containers, nodes, leaves.

Lists, tuples and dicts are known here; what JAX has registered (optax's named tuples,
flax's dataclasses) is asked of `ringjax.elastic.jax_leaves`, if the program uses JAX.
Everything else is a leaf. Not what leaves look like as bytes (`leaves.py`).
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ringjax.control.objects import is_named_callable

_SCALARS = str | bytes | int | float | complex


def jax_part() -> Any:
    """`ringjax.elastic.jax_leaves`, or None where no JAX has been imported."""
    if "jax" not in sys.modules:
        return None
    return importlib.import_module("ringjax.elastic.jax_leaves")


def is_jax(value: Any) -> bool:
    """Whether it is an array of JAX."""
    part = jax_part()
    return part is not None and bool(part.is_array(value))


def node(value: Any) -> Any:
    """A `jax_leaves.JaxNode` if JAX can take the value apart and this module cannot."""
    if value is None or isinstance(value, _SCALARS):
        return None
    part = jax_part()
    if part is None or part.is_array(value):
        return None
    return part.node(value)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same structure, with `leaf` of every leaf."""
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
    """The structure of `value`, with `leaf` of every leaf and its like in `other`.

    Entries of dicts are found by their keys, wherever they stand.

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
    beside = node(other)
    if inner is None or beside is None or inner.names != beside.names:
        raise ValueError(f"a {kind.__name__} and a {type(other).__name__} differ")
    pairs = zip(inner.children, beside.children, strict=True)
    return inner.rebuild([merged(*pair, leaf) for pair in pairs])


def leaves(value: Any) -> list[Any]:
    """All leaves, in the order of `mapped`."""
    found: list[Any] = []

    def note(one: Any) -> Any:
        found.append(one)
        return one

    mapped(value, note)
    return found


def jax_arrays(value: Any) -> list[Any]:
    """JAX's arrays in it."""
    part = jax_part()
    return [] if part is None else [one for one in leaves(value) if part.is_array(one)]


def kept(value: Any, *, copied: bool) -> Any:
    """A value that nobody changes any more.

    Containers are made anew, and what programs change in place is copied. JAX's arrays
    cannot be changed, so they are shared, unless they are to be `copied` because the
    program may donate them.
    """
    part = jax_part()

    def leaf(one: Any) -> Any:
        if part is not None and part.is_array(one):
            return part.copies([one])[0] if copied and not part.is_deleted(one) else one
        in_place = isinstance(one, set | bytearray) or hasattr(one, "__dlpack__")
        # As Horovod has it, objects of other kinds are copied in containers only.
        if (one is value and not in_place) or is_named_callable(one):
            return one
        try:
            return copy.deepcopy(one)
        except TypeError:  # it holds a lock, a file or the like
            return one

    return mapped(value, leaf)
