"""The sum of some pieces as a tree of JAX, and the layout of a tree in a flat array."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import PyTree


@dataclass(frozen=True)
class Layout:
    """The leaves of a tree, which lie one after the other in a flat array."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = field(compare=False)

    @property
    def bounds(self) -> list[int]:
        """The place where each leaf begins in the flat array, and the array's end."""
        return [0, *itertools.accumulate(map(math.prod, self.shapes))]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulator:
    """The sum of some pieces; `Sums.zeros` makes one, and it is a tree of JAX.

    Attributes:
        words: uint32[n, 2], an int64 for each element of all leaves, low word first.
        counts: int32[leaves, 2], how many values were too large for their leaf's
            exponent, and how many were NaN or infinite.
        top: float32[leaves], the largest finite magnitude of the pieces.
        checksum: uint32[4], the sums of the int64, and of the i-th times 2 i + 1.
        added: int32, the number of pieces.
    """

    words: Array
    counts: Array
    top: Array
    checksum: Array
    added: Array
    layout: Layout = field(metadata={"static": True})


def flatten(method: str, tree: PyTree) -> tuple[list[Array], Layout]:
    """Returns the leaves, which have dtypes of floats, and their layout."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs
    )
    leaves = [
        _floats(method, leaf, name)
        for (_, leaf), name in zip(pairs, names, strict=True)
    ]
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    return leaves, Layout(treedef, shapes, names)


def _floats(method: str, leaf: Any, name: str) -> Any:
    if not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"ringjax.exact.Sums.{method}: `tree` {name!r} has dtype {leaf.dtype.name} "
            f"and shape {tuple(leaf.shape)}, expected a dtype of floats; add integers "
            "by `extra` of exchange, and the parts of complex numbers as two leaves"
        )
    return leaf


def check_layout(given: Layout, expected: Layout) -> None:
    """Raises a ValueError that names the leaf in which two layouts differ."""
    if given == expected:
        return
    if given.treedef != expected.treedef:
        raise ValueError(
            f"ringjax.exact.Sums.add: `tree` has the leaves {', '.join(given.names)}, "
            f"expected those of zeros: {', '.join(expected.names)}"
        )
    for name, shape, other in zip(
        given.names, given.shapes, expected.shapes, strict=True
    ):
        if shape != other:
            raise ValueError(
                f"ringjax.exact.Sums.add: `tree` {name!r} has the shape {shape}, "
                f"expected {other}, as in zeros"
            )
