"""Which exceptions mean that ranks must come together again.

A failed collective in a compiled program reaches the training function as an exception
of JAX; this module reads its text, without importing JAX.
"""

from __future__ import annotations

from ringjax import errors


def failure(error: BaseException) -> errors.RingjaxError | None:
    """What went wrong between the ranks; None if `error` is not about that.

    Example:
        >>> failure(ValueError("mine")) is None
        True
    """
    if isinstance(error, errors.RingjaxError):
        return error
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError"):
        return None
    return errors.from_program(str(error))


def stale_programs(error: errors.RingjaxError) -> bool:
    """Whether a compiled program was made for another number of ranks.

    An allgather's result has the number of ranks in its shape, so its program cannot
    run in a smaller or larger job.
    """
    return "trace it again" in str(error)


def final(error: errors.RingjaxError) -> bool:
    """Whether another attempt would fail in the same way."""
    return isinstance(
        error, errors.InvalidArgument | errors.NotInitialized | errors.Fenced
    )
