"""Returns rank, size and similar values at the time at which a graph reads them."""

from __future__ import annotations

from ringjax import runtime

# Results of process_set_included besides 0 and 1; the values are Horovod's.
NOT_INITIALIZED, UNKNOWN_SET = -1, -2

_OF_WORLD = {
    "rank": runtime.rank,
    "local_rank": runtime.local_rank,
    "local_size": runtime.local_size,
}


def query(quantity: str, process_set_id: int = 0) -> int:
    """Returns the current value of a quantity.

    Args:
        quantity: rank, local_rank, local_size, size, set_rank or process_set_included.
            The value of process_set_included may be negative, as in Horovod.
        process_set_id: the process set, for the last three quantities.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> query("size") == ringjax.size(), query("process_set_included")
        (True, 1)
    """
    if quantity in _OF_WORLD:
        return _OF_WORLD[quantity]()
    if quantity == "process_set_included" and not runtime.is_initialized():
        return NOT_INITIALIZED
    sets = runtime.current(quantity).sets
    if process_set_id not in sets:
        if quantity == "process_set_included":
            return UNKNOWN_SET
        raise ValueError(
            f"ringjax.{quantity}_op: there is no process set {process_set_id}"
        )
    ranks = sets[process_set_id]
    if quantity == "size":
        return len(ranks)
    rank = runtime.rank()
    return ranks.index(rank) if quantity == "set_rank" else int(rank in ranks)
