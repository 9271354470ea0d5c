"""Averages of gradients by samples: what travels in place of the gradients of a rank.

``Σ w·g / Σ w`` is a sum of products, and of the weights beside them in the same call:
both are sums over the same ranks, also where one is lost on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ringjax.ops import ReduceOp


def check_weight(
    what: str, weight: Any, op: int, arrays: Sequence[Any], *, compressed: bool
) -> Any:
    """The weight of this rank as it travels, 0-d, in the widest type of the gradients.

    If they are compressed it is a complex number: those are never rounded on the way.
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
    # Not by promotion, which may be strict.
    is_double = any(jnp.finfo(array.dtype).bits == 64 for array in arrays)
    kind = jnp.float64 if is_double else jnp.float32
    if compressed:
        kind = jnp.complex128 if kind == jnp.float64 else jnp.complex64
    return own.astype(kind)


def _bad_weight(what: str, weight: Any) -> ValueError:
    shown = getattr(weight, "aval", weight)
    return ValueError(
        f"ringjax.{what}: `weight` is {shown!r}, expected one real number from 0: how "
        "many samples the gradients are the mean of"
    )


def weight_arrays(arrays: Sequence[Any], weight: Any) -> list[Any]:
    """What is summed: ``w·g`` of each, and w. Where w is 0, g may be NaN."""
    return [*(_scaled(x, operator.mul, weight.real) for x in arrays), weight]


def divide_by_total(sums: Sequence[Any]) -> list[Any]:
    """The averages, from the sums of `weight_arrays`; zeros if nobody has a weight."""
    *sums, total = sums
    return [_scaled(x, operator.truediv, total.real) for x in sums]


def _scaled(array: Any, by: Callable[[Any, Any], Any], weight: Any) -> Any:
    """In float32 at least; zero where the weight is."""
    is_narrow = jnp.finfo(array.dtype).bits < 32
    wide = array.astype(jnp.float32) if is_narrow else array
    out = by(wide, weight.astype(wide.dtype))
    return jnp.where(weight > 0, out, 0).astype(array.dtype)
