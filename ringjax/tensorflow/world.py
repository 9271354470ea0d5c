"""Rank, size and the like at the moment when a program asks, also from a graph."""

from __future__ import annotations

from ringjax import runtime

# What process_set_included may be instead of 0 or 1; the numbers are Horovod's.
NOT_INITIALIZED, UNKNOWN_SET = -1, -2

_WITHOUT_SET = {
    "rank": runtime.rank,
    "local_rank": runtime.local_rank,
    "local_size": runtime.local_size,
}


def number(what: str, process_set_id: int = 0) -> int:
    """One of rank, local_rank, local_size, size, set_rank and process_set_included.

    Args:
        what: which; the last one may also be a negative number, as in Horovod.
        process_set_id: for the last three.

    Raises:
        NotInitialized: before `init`.
        ValueError: there is no such process set.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> number("size") == ringjax.size(), number("process_set_included")
        (True, 1)
    """
    if what in _WITHOUT_SET:
        return _WITHOUT_SET[what]()
    if what == "process_set_included" and not runtime.is_initialized():
        return NOT_INITIALIZED
    sets = runtime.current(what).sets
    if process_set_id not in sets:
        if what == "process_set_included":
            return UNKNOWN_SET
        raise ValueError(f"ringjax.{what}_op: there is no process set {process_set_id}")
    members = sets[process_set_id]
    if what == "size":
        return len(members)
    me = runtime.rank()
    return members.index(me) if what == "set_rank" else int(me in members)
