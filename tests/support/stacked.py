"""Reference results for rank tests, computed from the inputs of all ranks.

Every rank draws the inputs of all ranks from a seed. Plain numpy then computes the
expected result of a collective, and plain jax the expected derivatives.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from support.draws import draw

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)


def draw_all(
    size: int, shape: tuple[int, ...], dtypes: Sequence[str] = DTYPES
) -> dict[str, list[np.ndarray]]:
    """Draws inputs of every dtype as one tree, so that a test compiles one program."""
    return {dtype: draw(size, shape, dtype) for dtype in dtypes}


def equal(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Asserts equal shapes, dtypes and values."""
    expected = np.asarray(expected)
    assert isinstance(actual, jax.Array), type(actual)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    wide = "complex128" if np.iscomplexobj(expected) else "float64"
    if tolerance == 0.0:
        np.testing.assert_array_equal(np.asarray(actual), expected)
    else:
        np.testing.assert_allclose(
            np.asarray(actual).astype(wide),
            expected.astype(wide),
            rtol=tolerance,
            atol=tolerance,
        )


def check_derivatives(
    rank: int,
    op: Callable[[Any], Any],
    model: Callable[[Sequence[Any]], Sequence[Any]],
    xs: Sequence[np.ndarray],
    *,
    tolerance: float = 1e-10,
) -> None:
    """Compares JVP, VJP and the VJP of a VJP with `model`'s, with and without jit.

    `op` is this rank's program. ``model([x of each rank]) -> [y of each rank]``
    computes all ranks' results by ordinary arithmetic, which jax can differentiate. The
    derivatives of `model` are computed under jit, because one large program compiles
    faster than dozens of small programs.
    """
    ys = jax.eval_shape(lambda xs: list(model(xs)), list(xs))
    ts = [
        np.cos(1.0 + i + np.arange(x.size)).reshape(x.shape) for i, x in enumerate(xs)
    ]
    cts = [
        np.sin(2.0 + i + np.arange(y.size)).reshape(y.shape) for i, y in enumerate(ys)
    ]
    ts = [t.astype(x.dtype) for t, x in zip(ts, xs, strict=True)]
    cts = [ct.astype(y.dtype) for ct, y in zip(cts, ys, strict=True)]

    def jvp(f: Any, x: Any, t: Any) -> Any:
        return jax.jvp(f, (x,), (t,))[1]

    def vjp(f: Any, x: Any, ct: Any) -> Any:
        return jax.vjp(f, x)[1](ct)[0]

    def twice(f: Any, x: Any, ct: Any, t: Any) -> Any:
        return jax.vjp(lambda v: vjp(f, v, ct), x)[1](t)[0]

    def of(f: Any, x: Any, t: Any, ct: Any) -> list[Any]:
        return [jvp(f, x, t), vjp(f, x, ct), twice(f, x, ct, t)]

    @jax.jit
    def wanted(xs: Any, ts: Any, cts: Any) -> list[Any]:
        return [every[rank] for every in of(model, xs, ts, cts)]

    expected = wanted(list(xs), ts, cts)
    # jnp.asarray would compile a program for every shape.
    mine = [jax.device_put(every[rank]) for every in (xs, ts, cts)]
    derivatives = functools.partial(of, op)
    for f in (derivatives, jax.jit(derivatives)):
        for got, want in zip(f(*mine), expected, strict=True):
            equal(got, want, tolerance)


def raises(kind: type[Exception], *parts: str) -> Any:
    """Expects an exception whose message contains all `parts`, in this order."""
    pattern = "(?s)" + ".*".join(re.escape(part) for part in parts)
    return pytest.raises(kind, match=pattern)
