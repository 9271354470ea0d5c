"""Sums of floats in 64-bit fixed point, as programs of XLA: encode, add, decode.

An element of a sum is an int64, the multiple of its leaf's unit, a power of two. Sums
of int64 depend neither on their order nor on their grouping. Arrays of a caller hold
each int64 as two uint32, the low word first, so programs need not set jax_enable_x64;
in this module it is set while a function is traced.

All results are defined for the last bit, also where XLA flushes denormals to zero: a
unit is at least 2^-125, so a denormal float32 is always rounded to 0. The functions of
`xla_ext/exact/fixed_point.h` compute the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

P = ParamSpec("P")
T = TypeVar("T")

_INFINITY = 0x7F800000  # the bits of a float32
# A value may be 2^8 times as large as the largest value of the last step.
MARGIN = 8
LOWEST_UNIT = -125


def _with_x64(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return traced


def width(pieces: int) -> int:
    """Returns the bits of one piece's values, without sign: `pieces` sums fit in 62.

    Example:
        >>> width(1), width(12), width(2048)
        (62, 58, 51)
    """
    return 62 - (pieces - 1).bit_length()


def units(exponents: jax.Array, pieces: int) -> jax.Array:
    """Returns the exponents of the units of leaves with these exponents."""
    return jnp.maximum(exponents + (1 + MARGIN - width(pieces)), LOWEST_UNIT)


def magnitude(values: jax.Array) -> jax.Array:
    """Returns the bits of |values| as float32, in int32: they are ordered as values."""
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    return bits & 0x7FFFFFFF


def exponent(bits: jax.Array) -> jax.Array:
    """Returns floor(log2) of float32 values whose bits are given; -127 for denormals.

    Example:
        >>> exponent(magnitude(jnp.array([1.0, -3.0, 0.0]))).tolist()
        [0, 1, -127]
    """
    return (bits >> 23) - 127


def _power(n: jax.Array) -> jax.Array:
    """Returns the float64 2^n, for n of normal numbers."""
    return lax.bitcast_convert_type((n.astype(jnp.int64) + 1023) << 52, jnp.float64)


@_with_x64
def add_leaves(
    words: jax.Array,
    counts: jax.Array,
    tops: jax.Array,
    checksum: jax.Array,
    units: jax.Array,
    *leaves: jax.Array,
    width: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds one leaf or more to the parts of an accumulator; returns its new parts.

    The parts are those of `Accumulator`, and the terms are rint(values / 2^unit), or 0
    for values that do not fit.
    """
    encoded = [_encode(leaf, units[i], width) for i, leaf in enumerate(leaves)]
    terms, lost, largest = zip(*encoded, strict=True)
    added = jnp.concatenate(terms)
    total = integers(checksum.reshape(2, 2)) + _checksum(added)
    return (
        _words(integers(words) + added),
        counts + jnp.stack(lost),
        jnp.maximum(tops, jnp.stack(largest)),
        _words(total).ravel(),
    )


def _encode(
    values: jax.Array, unit: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns terms, how many are too large and not finite, the largest magnitude."""
    values = values.ravel()
    bits = magnitude(values)
    finite = bits < _INFINITY
    fits = exponent(bits) < unit + width
    scaled = jnp.where(fits & finite, values, 0).astype(jnp.float64) * _power(-unit)
    lost = jnp.stack([jnp.sum(finite & ~fits), jnp.sum(~finite)]).astype(jnp.int32)
    normal = jnp.where(finite & (bits >> 23 > 0), bits, 0)
    top = lax.bitcast_convert_type(jnp.max(normal, initial=0), jnp.float32)
    return jnp.rint(scaled).astype(jnp.int64), lost, top


@_with_x64
def integers(words: jax.Array) -> jax.Array:
    """Returns uint32[..., 2] as int64[...]."""
    return lax.bitcast_convert_type(words, jnp.int64)


def _words(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.uint32)


def _checksum(values: jax.Array) -> jax.Array:
    """Returns the sum of int64[n], and that of values times 2 i + 1."""
    weights = 2 * jnp.arange(values.size, dtype=jnp.int64) + 1
    return jnp.stack([jnp.sum(values), jnp.sum(values * weights)])


@_with_x64
def decode(sums: jax.Array, unit: jax.Array, pieces: int) -> jax.Array:
    """Returns int64[n] sums divided by `pieces` as float32; denormals become 0."""
    mean = sums.astype(jnp.float64) * ((1.0 / pieces) * _power(unit))
    # The comparison, and not the CPU's mode, decides which means are 0.
    normal = jnp.abs(mean) >= jnp.finfo(jnp.float32).tiny
    return jnp.where(normal, mean, 0).astype(jnp.float32)
