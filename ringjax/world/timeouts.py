"""How long a collective waits for other ranks: of one call, of a process set, of a job.

The nearest one counts: `collective_timeout` around the call, else the process set's,
else RINGJAX_COLLECTIVE_TIMEOUT. A limit concerns this rank only, so ranks may differ.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

JOBS = -1.0  # what the core takes for "as the job has it"

_around: ContextVar[float | None] = ContextVar("collective_timeout", default=None)


@contextlib.contextmanager
def collective_timeout(seconds: float) -> Iterator[None]:
    """Limits how long the collectives called inside may wait for other ranks.

    At the limit the same happens as at RINGJAX_COLLECTIVE_TIMEOUT: an error that names
    who has not called; in an elastic job that rank is lost. Stronger than the limit of
    a process set. Holds for collectives of JAX arrays, `ringjax.eager` and
    `ringjax.torch`, as called by this thread (or asyncio task), and waits for what was
    submitted inside keep it. Not for hooks that PyTorch runs in threads of its own, as
    it does for CUDA tensors.

    A compiled program keeps the limit of the moment when it was *traced*: inside of a
    jitted function this works, around a call of it only the first time, and a program
    that has been compiled before does not notice. Limits are no part of jax's cache.

    Args:
        seconds: of this rank waiting, 0 (or infinity): for ever. Waits are looked at a
            few times a second, so less than 0.1 means about that.

    Raises:
        ValueError: it is negative, NaN, or not a number.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> with ringjax.collective_timeout(30):
        ...     total = ringjax.allreduce(jnp.ones(2), op=ringjax.Sum)
    """
    token = _around.set(checked(seconds, "ringjax.collective_timeout: seconds"))
    try:
        yield
    finally:
        _around.reset(token)


def checked(seconds: object, what: str) -> float:
    """A limit that can be; `what` names it in the ValueError. Infinity becomes 0."""
    if isinstance(seconds, bool | str | bytes):
        number = math.nan
    else:
        try:
            number = float(seconds)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
    if not number >= 0:
        raise ValueError(
            f"{what} must be a number of seconds from 0 on, 0 for no limit, not "
            f"{seconds!r}"
        )
    return 0.0 if math.isinf(number) else number


def now(of_set: float | None) -> float:
    """What a call made now has.

    Args:
        of_set: the limit of its process set, None for none.

    Returns:
        Seconds, 0 for no limit, `JOBS` for the job's.
    """
    around = _around.get()
    nearest = of_set if around is None else around
    return JOBS if nearest is None else nearest
