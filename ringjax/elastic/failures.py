"""Which exceptions mean that ranks must come together again.

A failed collective in a compiled program or graph reaches the training function as an
exception of JAX or TensorFlow; this module reads its text, without importing either.
"""

from __future__ import annotations

import re

from ringjax import errors

# TensorFlow's codes, and what of ours becomes them; UNKNOWN is more than one thing.
_TENSORFLOW = {3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 9: "MISMATCH"}


def failure(error: BaseException) -> errors.RingjaxError | None:
    """What went wrong between the ranks; None if `error` is not about that.

    Example:
        >>> failure(ValueError("mine")) is None
        True
    """
    if isinstance(error, errors.RingjaxError):
        return error
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OpError" in kinds and hasattr(error, "error_code"):
        return _of_tensorflow(str(error), int(error.error_code))
    if not kinds & {"JaxRuntimeError", "XlaRuntimeError"}:
        return None
    return errors.from_program(str(error))


def _of_tensorflow(text: str, code: int) -> errors.RingjaxError | None:
    # Behind the message TensorFlow says which node of the graph has failed.
    found = re.search(r"(?s)RINGJAX\[.*?(?=\n\s*\[\[|$)", text)
    if found is None:
        return None
    culprit = re.search(r"\brank (\d+)", found[0])
    known = _TENSORFLOW.get(code, "UNAVAILABLE" if culprit else "UNKNOWN")
    return errors.from_code(known, found[0].strip(), int(culprit[1]) if culprit else -1)


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
