"""Handles the JAX arrays and the registered tree nodes in a training state.

`ringjax.elastic` imports this module only if the program has imported JAX. No argument
is ever a tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.control.objects import Array
from ringjax.elastic import jax_shards as shards
from ringjax.xla import tokens


class JaxNode(NamedTuple):
    """A value that JAX can flatten into children, such as a named tuple.

    Attributes:
        names: JAX's names of the children.
        children: the values one level below.
        rebuild: makes a value of the same type from other children.
    """

    names: list[str]
    children: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def node(value: Any) -> JaxNode | None:
    """Flattens `value` by one level. Returns None if the value is a leaf for JAX."""
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


def is_array(value: object) -> bool:
    """Returns whether `value` is an array of JAX or a key of jax.random."""
    return isinstance(value, jax.Array)


def describe(value: jax.Array) -> tuple[str, str | bool]:
    """Returns the arguments `kind` and `detail` for `array_of`."""
    if not value.is_fully_addressable:
        return "shards", shards.describe(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(value))
    return "jax", bool(value.weak_type)


def data_of(value: jax.Array) -> Array:
    """Waits for an array, and returns its memory; on CPUs without a copy."""
    if not value.is_fully_addressable:
        return shards.data_of(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def array_of(data: Array, kind: str, detail: str | bool, like: object) -> jax.Array:
    """Returns a JAX array of `data`. The caller must not change `data` afterwards.

    On CPUs, memory aligned to 64 bytes is used without a copy. `kind` and `detail` are
    the results of `describe`. `like` is this rank's value in the same place of the
    state. If the program has committed `like` to a device, the new array is put on that
    device, too.
    """
    if kind == "shards":
        return shards.array_of(data, str(detail), like)
    if kind == "key":
        key: jax.Array = jax.random.wrap_key_data(jax.device_put(data), impl=detail)
        return key
    if detail and data.ndim == 0:  # the array has a weak type, like jnp.asarray(1.0)
        weak: jax.Array = jnp.asarray(data.item())
        if weak.dtype == data.dtype:
            return weak
    sharding = None
    if isinstance(like, jax.Array) and like.committed:
        sharding = like.sharding
    array: jax.Array = jax.device_put(data, sharding)
    return array


def forget_programs() -> None:
    """Clears JAX's caches, so that every function is traced and compiled again."""
    jax.clear_caches()


def is_deleted(value: jax.Array) -> bool:
    """Returns whether the memory of an array was donated to a program."""
    return bool(value.is_deleted())


def copy_of(value: jax.Array) -> jax.Array:
    """Copies the memory of an array."""
    copied: jax.Array = jnp.copy(value)
    return copied


def wait(values: Iterable[jax.Array]) -> None:
    """Waits for these arrays, and for collectives that no array depends on.

    Raises:
        JaxRuntimeError: the program that computes an array has failed.
    """
    jax.block_until_ready([value for value in values if not value.is_deleted()])
    tokens.wait_for_programs()
