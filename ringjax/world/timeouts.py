"""Limits the time that a collective waits for other ranks.

A call uses the first of these limits that is set: the limit of `collective_timeout`
around the call, the limit of its process set, RINGJAX_COLLECTIVE_TIMEOUT. A limit
applies to the waits of this rank only, so ranks may have different limits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

from ringjax import _native

JOB_LIMIT = -1.0  # the core's code for RINGJAX_COLLECTIVE_TIMEOUT

_context_limit: ContextVar[float | None] = ContextVar(
    "collective_timeout", default=None
)


@contextlib.contextmanager
def collective_timeout(seconds: float) -> Iterator[None]:
    """Limits how long collectives in a `with` block may wait for other ranks.

    At the limit the call fails as at RINGJAX_COLLECTIVE_TIMEOUT: its error names the
    ranks that have not made the call. In an elastic job these ranks count as lost. The
    limit overrides the limit of a process set.

    The limit applies to collectives of JAX arrays, `ringjax.eager` and `ringjax.torch`
    that are called by this thread or asyncio task. Operations that are submitted inside
    keep the limit until they end. The limit does not apply to hooks that PyTorch runs
    in threads of its own, such as hooks of CUDA tensors.

    A compiled program keeps the limit of the moment when it was *traced*. Use this
    context manager inside of a jitted function. Around a call of the function it only
    has an effect on the call that compiles, because JAX's cache ignores limits.

    Args:
        seconds: the longest wait of this rank; 0 or infinity for no limit. The core
            checks waits a few times a second, so a limit below 0.1 means about 0.1.

    Raises:
        ValueError: `seconds` is negative, NaN, or not a number.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> with ringjax.collective_timeout(30):
        ...     total = ringjax.allreduce(jnp.ones(2), op=ringjax.Sum)
    """
    limit = checked_limit(seconds, "ringjax.collective_timeout: seconds")
    token = _context_limit.set(limit)
    try:
        yield
    finally:
        _context_limit.reset(token)


def checked_limit(seconds: object, what: str) -> float:
    """Returns `seconds` as a valid limit. Infinity becomes 0, which means no limit.

    Raises ValueError if `seconds` is negative, NaN or not a number. `what` names the
    value in the error.
    """
    number = math.nan
    if not isinstance(seconds, bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(seconds)  # type: ignore[arg-type]
    if not number >= 0:
        raise ValueError(
            f"{what} must be a number of seconds from 0 on, 0 for no limit, not "
            f"{seconds!r}"
        )
    # Plain calls of ringjax.eager need not look for limits until there is one.
    _native.heed_limits()
    return 0.0 if math.isinf(number) else number


def current_limit(set_limit: float | None) -> float:
    """Returns the limit in seconds that applies to a call now.

    `set_limit` is the limit of the call's process set, or None if the set has no limit.
    A result of 0 means no limit, and `JOB_LIMIT` means RINGJAX_COLLECTIVE_TIMEOUT.
    """
    context_limit = _context_limit.get()
    limit = set_limit if context_limit is None else context_limit
    return JOB_LIMIT if limit is None else limit
