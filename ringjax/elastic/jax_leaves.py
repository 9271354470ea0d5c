"""JAX's part of what a training state may hold: arrays as memory, registered nodes.

For `ringjax.elastic`, which imports no framework and asks here if the program has
imported JAX. Not for what is traced; that is the business of the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.elastic import jax_shards as shards
from ringjax.xla import tokens

Array = np.ndarray[Any, Any]


class JaxNode(NamedTuple):
    """A value that JAX knows how to take apart: a named tuple, and the like.

    Attributes:
        names: of the children, as JAX calls them.
        children: the values inside, one level down.
        rebuild: makes a value like this one from other children.
    """

    names: list[str]
    children: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def node(value: Any) -> JaxNode | None:
    """One level of `value`, or None if it is a leaf to JAX."""
    found, treedef = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda part: part is not value
    )
    if len(found) == 1 and not found[0][0]:
        return None
    return JaxNode(
        [jax.tree_util.keystr(path) for path, _ in found],
        [child for _, child in found],
        lambda children: jax.tree_util.tree_unflatten(treedef, children),
    )


def is_array(value: Any) -> bool:
    """Whether it is one of JAX's, a key of jax.random included."""
    return isinstance(value, jax.Array)


def describe(value: Any) -> tuple[str, str | bool]:
    """What `array_of` must know besides the data: its kind and a detail."""
    if not value.is_fully_addressable:
        return "shards", shards.describe(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(value))
    return "jax", bool(value.weak_type)


def data_of(value: Any) -> Array:
    """The memory of an array; on CPUs it is not copied. Waits until it is there."""
    if not value.is_fully_addressable:
        return shards.data_of(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def array_of(data: Array, kind: str, detail: str | bool, like: Any) -> Any:
    """A JAX array of `data`, which belongs to it from now on.

    Args:
        data: the memory; not copied on CPUs if it is aligned.
        kind: of `describe`, as is `detail`.
        like: what this rank has in its place; if that is an array which was put on a
            device on purpose, the new one goes there too.
    """
    if kind == "shards":
        return shards.array_of(data, str(detail), like)
    if kind == "key":
        return jax.random.wrap_key_data(jax.device_put(data), impl=detail)
    if detail and data.ndim == 0:  # a type that gives way to others, like 1.0 has
        weak = jnp.asarray(data.item())
        if weak.dtype == data.dtype:
            return weak
    if isinstance(like, jax.Array) and like.committed:
        return jax.device_put(data, like.sharding)
    return jax.device_put(data)


def forget_programs() -> None:
    """Everything is traced and compiled again when it is called again."""
    jax.clear_caches()


def is_deleted(value: Any) -> bool:
    """Whether its memory was donated to a program."""
    return bool(value.is_deleted())


def copies(values: Sequence[Any]) -> list[Any]:
    """Arrays like these in memory of their own."""
    return [jnp.copy(value) for value in values]


def wait(values: Iterable[Any]) -> None:
    """Returns when these arrays, and collectives that stand alone, are finished.

    Raises:
        JaxRuntimeError: the program that makes one of them has failed.
    """
    jax.block_until_ready([value for value in values if not value.is_deleted()])
    tokens.wait_for_programs()
