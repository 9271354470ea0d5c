"""Signature: the shapes and dtypes that the data of all pieces must have."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringjax.pieces.training import NAME, check_devices, paths


class Signature:
    """The shapes and dtypes of the data of one piece, which all pieces must have."""

    def __init__(self, data: Any) -> None:
        check_devices("data", data)
        self._leaves, self._structure = _signature(data)
        self._paths = [name for name, _ in paths(data)]

    def check(self, data: Any, number: int, piece: int) -> None:
        """Raises a ValueError if the data of another piece differ."""
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
            if new != old:
                raise ValueError(
                    f"{what} {name!r} as {new[1]}{list(new[0])}, and before as "
                    f"{old[1]}{list(old[0])}; all pieces of all steps need one shape "
                    "and dtype: leave out the rows that do not fill a batch"
                )

    def example(self) -> Any:
        """Returns arrays' shapes and dtypes, in the structure of the data."""
        return jax.tree.unflatten(
            self._structure, [jax.ShapeDtypeStruct(*leaf) for leaf in self._leaves]
        )


def _signature(data: Any) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, structure = jax.tree.flatten(data)
    return [(np.shape(x), jax.dtypes.result_type(x)) for x in leaves], structure
