"""Named operations that move arrays of any framework, and the one that only waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.eager.operands import to_operand
from ringjax.eager.operations import (
    as_list,
    first,
    operands,
    submit,
    submit_rows,
    try_blocking,
)
from ringjax.world.process_set import ProcessSet, global_process_set

_global = global_process_set


def allgather_async(
    tensor: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Handle:
    """`allgather` that returns a handle at once."""
    return _gather([tensor], name, process_set, as_list(out), first)


def allgather(
    tensor: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Any:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args:
        tensor: as for `allreduce`, but not 0-d. The number of rows may differ from rank
            to rank, the other dimensions may not.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.
        out: where the result goes, as for `allreduce`, with as many rows as all ranks
            have together. It must not share memory with `tensor`.

    Raises: as `allreduce`; ValueError also if `out` has other rows than the result.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.allgather(np.array([7])).tolist()
        [7]
    """
    if out is not None:
        result = try_blocking("allgather", tensor, out, name, process_set)
        if result is not None:
            return result
    return _gather([tensor], name, process_set, as_list(out), first, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Sequence[Any] | None = None,
) -> Handle:
    """`grouped_allgather` that returns a handle at once."""
    return _gather(tensors, name, process_set, out, list)


def grouped_allgather(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """`allgather` of several tensors as one operation; returns a list.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> [x.tolist() for x in ringjax.eager.grouped_allgather([b"a", b"bc"])]
        [[97], [98, 99]]
    """
    handle = _gather(tensors, name, process_set, out, list, waits=True)
    result: list[Any] = handle.wait()
    return result


def _gather(
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    outs: Sequence[Any] | None,
    result: Callable[[list[Any]], Any],
    waits: bool = False,
) -> Handle:
    given = operands("allgather", name, tensors)
    return submit_rows(
        *("allgather", name, given, outs, process_set),
        lambda made, _: result(made),
        waits=waits,
    )


def broadcast_async(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Handle:
    """`broadcast` that returns a handle at once."""
    root = lane.root_in_set("broadcast", root_rank, process_set)
    return _cast(tensor, root, name, process_set, out)


def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Any:
    """Returns the root's `tensor` on every rank.

    Args:
        tensor: the same dtype and shape on all ranks, also where the values do not
            matter.
        root_rank: the sender's rank in the world, also when a process set is given.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.
        out: where the result goes, as for `allreduce`; maybe `tensor` itself.

    Raises: as `allreduce`.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.broadcast(np.arange(3), root_rank=0).tolist()
        [0, 1, 2]
    """
    root = lane.root_in_set("broadcast", root_rank, process_set)
    result = try_blocking("broadcast", tensor, out, name, process_set, root=root)
    if result is not None:
        return result
    return _cast(tensor, root, name, process_set, out, waits=True).wait()


def _cast(
    tensor: Any,
    root: int,
    name: str | None,
    process_set: ProcessSet,
    out: Any,
    waits: bool = False,
) -> Handle:
    given = [to_operand("broadcast", name, tensor)]
    return submit(
        *("broadcast", name, given, [given[0].array.shape]),
        *(as_list(out), process_set, first),
        root=root,
        waits=waits,
    )


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Handle:
    """`alltoall` that returns a handle at once."""
    return _exchange(tensor, splits, name, process_set, out)


def _exchange(
    tensor: Any,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    out: Any,
    waits: bool = False,
) -> Handle:
    def result(made: list[Any], received: list[list[int]]) -> Any:
        return made[0] if splits is None else (made[0], np.array(received[0], np.int32))

    return submit_rows(
        *("alltoall", name, operands("alltoall", name, [tensor])),
        *(as_list(out), process_set, result),
        splits=[] if splits is None else lane.parse_splits("alltoall", name, splits),
        waits=waits,
    )


def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Any:
    """Sends a part of the rows to each rank, and returns the rows for this one.

    Args:
        tensor: as for `allgather`.
        splits: how many rows go to each rank, in the order of the ranks; None: all the
            same.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.
        out: where the result goes, as for `allgather`.

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
    if out is not None and splits is None:
        result = try_blocking("alltoall", tensor, out, name, process_set)
        if result is not None:
            return result
    return _exchange(tensor, splits, name, process_set, out, waits=True).wait()


def barrier(*, name: str | None = None, process_set: ProcessSet = _global) -> None:
    """Waits until all ranks of the process set have come here.

    Raises: NotInitialized, Stalled, PeerLost.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.barrier()
    """
    lane.submit(
        *("barrier", name, [], []),
        finish=lambda _: None,
        process_set=process_set,
        waits=True,
    ).wait()
