"""Named operations that move arrays of any framework, and the one that only waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax import runtime
from ringjax.eager import lane
from ringjax.eager.arrays import operand
from ringjax.eager.lane import Handle
from ringjax.eager.operations import first, gather, submit

_global = runtime.global_process_set


def allgather_async(
    tensor: Any,
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Handle:
    """`allgather` that returns a handle at once."""
    return gather([tensor], name, process_set, first)


def allgather(
    tensor: Any,
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Any:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args:
        tensor: as for `allreduce`, but not 0-d. The number of rows may differ from rank
            to rank, the other dimensions may not.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.

    Raises: as `allreduce`.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.allgather(np.array([7])).tolist()
        [7]
    """
    return allgather_async(tensor, name=name, process_set=process_set).wait()


def grouped_allgather_async(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Handle:
    """`grouped_allgather` that returns a handle at once."""
    return gather(tensors, name, process_set, list)


def grouped_allgather(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> list[Any]:
    """`allgather` of several tensors as one operation; returns a list.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> [x.tolist() for x in ringjax.eager.grouped_allgather([b"a", b"bc"])]
        [[97], [98, 99]]
    """
    handle = grouped_allgather_async(tensors, name=name, process_set=process_set)
    result: list[Any] = handle.wait()
    return result


def broadcast_async(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Handle:
    """`broadcast` that returns a handle at once."""
    root = lane.root_in_set("broadcast", root_rank, process_set)
    given = [operand("broadcast", name, tensor)]
    out = given[0].like(given[0].array.shape)
    return submit("broadcast", name, given, [out], process_set, first, root=root)


def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Any:
    """Returns the root's `tensor` on every rank.

    Args:
        tensor: the same dtype and shape on all ranks, also where the values do not
            matter.
        root_rank: the sender's rank in the world, also when a process set is given.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.

    Raises: as `allreduce`.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.broadcast(np.arange(3), root_rank=0).tolist()
        [0, 1, 2]
    """
    handle = broadcast_async(tensor, root_rank, name=name, process_set=process_set)
    return handle.wait()


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Handle:
    """`alltoall` that returns a handle at once."""
    given = operand("alltoall", name, tensor)
    lane.with_rows("alltoall", name, given.piece)
    rows = [] if splits is None else lane.splits_of("alltoall", name, splits)

    def finish(ticket: Any) -> Any:
        received = list(ticket.received(0))
        out = given.adopt(ticket.output(0), sum(received))
        return out if splits is None else (out, np.array(received, np.int32))

    return lane.submit(
        *("alltoall", name, [given.piece], []),
        finish=finish,
        process_set=process_set,
        splits=rows,
        keep=given.array,
    )


def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
) -> Any:
    """Sends a part of the rows to each rank, and returns the rows for this one.

    Args:
        tensor: as for `allgather`.
        splits: how many rows go to each rank, in the order of the ranks; None: all the
            same.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.

    Returns:
        The rows that came, in the order of the ranks; with `splits` also, as int32, how
        many came from each.

    Raises: as `allreduce`; ValueError also for splits that do not fit the rows.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.alltoall(np.arange(3)).tolist()
        [0, 1, 2]
    """
    return alltoall_async(tensor, splits, name=name, process_set=process_set).wait()


def barrier(
    *, name: str | None = None, process_set: runtime.ProcessSet = _global
) -> None:
    """Waits until all ranks of the process set have come here.

    Raises: NotInitialized, Stalled, PeerLost.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.barrier()
    """
    lane.submit(
        "barrier", name, [], [], finish=lambda _: None, process_set=process_set
    ).wait()
