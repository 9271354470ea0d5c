"""Averages gradients with weights, such as the number of samples of each rank.

The average is ``Σ w·g / Σ w``. One call sums the products ``w·g`` and the weights `w`,
so that both sums are over the same ranks even if a rank is lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ringjax.ops import ReduceOp
from ringjax.xla.jax_types import Traced


def check_weight(
    what: str,
    weight: ArrayLike,
    op: ReduceOp | int,
    arrays: Sequence[Traced],
    *,
    compressed: bool,
) -> Traced:
    """Checks the weight of this rank, and converts it to a 0-d array.

    `what` is the name of the function, for errors. If `compressed` is true, gradients
    are sent in a narrower dtype. The weight is then a complex number, because complex
    numbers are never compressed.
    """
    if op != ReduceOp.Average:
        raise ValueError(
            f"ringjax.{what}: `weight` needs op=Average, not {ReduceOp(op).name}"
        )
    for array in arrays:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(
                f"ringjax.{what}: `weight` needs gradients that are floats or complex, "
                f"not {array.dtype.name}"
            )
    try:
        own = jnp.asarray(weight)
    except (TypeError, ValueError):
        raise _bad_weight(what, weight) from None
    real = jnp.issubdtype(own.dtype, jnp.floating)
    if own.ndim or not (real or jnp.issubdtype(own.dtype, jnp.integer)):
        raise _bad_weight(what, weight)
    if not isinstance(own, jax.core.Tracer) and not 0 <= float(own) < float("inf"):
        raise _bad_weight(what, weight)
    # Convert the weight explicitly, because a program may have forbidden JAX's implicit
    # promotion of dtypes.
    is_double = any(jnp.finfo(array.dtype).bits == 64 for array in arrays)
    kind = jnp.float64 if is_double else jnp.float32
    if compressed:
        kind = jnp.complex128 if kind == jnp.float64 else jnp.complex64
    return own.astype(kind)


def _bad_weight(what: str, weight: object) -> ValueError:
    shown = getattr(weight, "aval", weight)
    return ValueError(
        f"ringjax.{what}: `weight` is {shown!r}, expected one real number from 0: how "
        "many samples the gradients are the mean of"
    )


def weight_arrays(arrays: Sequence[Traced], weight: Traced) -> list[Traced]:
    """Returns the arrays to sum over all ranks: ``w·g`` of each gradient, and w.

    If w is 0, the products are 0 even if a gradient is NaN.
    """
    return [*(_scaled(x, operator.mul, weight.real) for x in arrays), weight]


def divide_by_total(sums: Sequence[Traced]) -> list[Traced]:
    """Returns the averages from the sums of `weight_arrays`, or 0 if all w are 0."""
    *sums, total = sums
    return [_scaled(x, operator.truediv, total.real) for x in sums]


def _scaled(
    array: Traced, by: Callable[[Traced, Traced], Traced], weight: Traced
) -> Traced:
    """Returns ``by(array, weight)``, in float32 or wider; 0 if the weight is 0."""
    is_narrow = jnp.finfo(array.dtype).bits < 32
    wide = array.astype(jnp.float32) if is_narrow else array
    out = by(wide, weight.astype(wide.dtype))
    return jnp.where(weight > 0, out, 0).astype(array.dtype)
