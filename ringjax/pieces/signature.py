"""Signature: the shapes, dtypes and shardings that the data of all pieces must have."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringjax.pieces.sharded import on_several
from ringjax.pieces.training import NAME, paths

_ARRAYS = (bool, int, float, complex, np.ndarray, np.generic, jax.Array)


class Signature:
    """The shapes, dtypes and shardings of one piece, which all pieces must have."""

    def __init__(self, data: Any) -> None:
        for name, leaf in paths(data):
            if not isinstance(leaf, _ARRAYS):
                raise TypeError(
                    f"{NAME}: `load` returned {name!r} as {type(leaf).__name__}, "
                    "expected an array of NumPy or JAX, or a number; convert it, or "
                    "leave it out"
                )
        self._leaves, self._structure = _signature(data)
        self._exact = _exact(data)
        self._paths = [name for name, _ in paths(data)]

    def check(self, data: Any, number: int, piece: int) -> None:
        """Raises a ValueError if the data of another piece differ."""
        # JAX's dtypes take 4 us a leaf to find, but pieces are nearly always alike.
        if _exact(data) == self._exact:
            return
        leaves, structure = _signature(data)
        if (leaves, structure) == (self._leaves, self._structure):
            return
        what = f"{NAME}: load({number}, {piece}) returned"
        if structure != self._structure:
            raise ValueError(
                f"{what} {structure}, and before it returned {self._structure}; all "
                "pieces need one structure"
            )
        for name, new, old in zip(self._paths, leaves, self._leaves, strict=True):
            if new[:2] == old[:2] and new != old:
                raise ValueError(
                    f"{what} {name!r} with the sharding {new[2]}, and before with "
                    f"{old[2]}; all pieces of all steps need one sharding"
                )
            if new != old:
                raise ValueError(
                    f"{what} {name!r} as {new[1]}{list(new[0])}, and before as "
                    f"{old[1]}{list(old[0])}; all pieces of all steps need one shape "
                    "and dtype: leave out the rows that do not fill a batch"
                )

    def example(self) -> Any:
        """Returns what `jax.eval_shape` needs, in the structure of the data."""
        leaves = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for shape, dtype, sharding in self._leaves
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _signature(data: Any) -> tuple[list[tuple[Any, Any, Any]], Any]:
    leaves, structure = jax.tree.flatten(data)
    return [
        (np.shape(x), jax.dtypes.result_type(x), x.sharding if on_several(x) else None)
        for x in leaves
    ], structure


def _exact(data: Any) -> tuple[list[tuple[Any, Any, Any]], Any]:
    """Returns the arrays' own shapes, dtypes and shardings; of numbers the types."""
    leaves, structure = jax.tree.flatten(data)
    return [
        (
            getattr(x, "shape", None),
            getattr(x, "dtype", type(x)),
            getattr(x, "sharding", None),
        )
        for x in leaves
    ], structure
