"""What a failure between ranks means for elastic training.

That an exception of JAX or TensorFlow is one: `errors.translate`.
"""

from __future__ import annotations

from ringjax import errors


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
