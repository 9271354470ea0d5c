"""Named operations that move arrays of any framework, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.eager.operands import AnyArray, to_operand
from ringjax.eager.operations import (
    Outs,
    Pick,
    as_list,
    first,
    operands,
    runs_plain,
    submit,
    submit_ragged,
)
from ringjax.world.process_set import ProcessSet, global_process_set


def allgather_async(
    tensor: AnyArray,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> Handle:
    """Submits an `allgather` and returns its handle immediately."""
    return _allgather([tensor], name, process_set, as_list(out), first)


@runs_plain
def allgather(
    tensor: AnyArray,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> AnyArray:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args:
        tensor: as for `allreduce`, with at least one dimension. The number of rows may
            differ between ranks; all other dimensions must be equal.
        name: the name of the operation, equal on all ranks.
        process_set: the ranks that take part; this rank must be among them.
        out: receives the result, as for `allreduce`. `out` must have as many rows as
            all ranks have together, and must not share memory with `tensor`.

    Raises: as `allreduce`; ValueError also if `out` has another number of rows than the
        result.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.allgather(np.array([7])).tolist()
        [7]
    """
    outs = as_list(out)
    return _allgather([tensor], name, process_set, outs, first, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[AnyArray],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: Sequence[AnyArray] | None = None,
) -> Handle:
    """Submits a `grouped_allgather` and returns its handle immediately."""
    return _allgather(tensors, name, process_set, out, list)


def grouped_allgather(
    tensors: Sequence[AnyArray],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: Sequence[AnyArray] | None = None,
) -> list[AnyArray]:
    """Gathers several tensors as one operation; see `allgather`.

    Returns:
        The list of the gathered tensors.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> [x.tolist() for x in ringjax.eager.grouped_allgather([b"a", b"bc"])]
        [[97], [98, 99]]
    """
    handle = _allgather(tensors, name, process_set, out, list, waits=True)
    result: list[AnyArray] = handle.wait()
    return result


def _allgather(
    tensors: Sequence[AnyArray],
    name: str | None,
    process_set: ProcessSet,
    outs: Outs,
    pick: Pick,
    *,
    waits: bool = False,
) -> Handle:
    return submit_ragged(
        "allgather",
        name,
        operands("allgather", name, tensors),
        outs,
        process_set,
        pick=lambda made, _: pick(made),
        waits=waits,
    )


def broadcast_async(
    tensor: AnyArray,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> Handle:
    """Submits a `broadcast` and returns its handle immediately."""
    root = lane.root_in_set("broadcast", root_rank, process_set)
    return _broadcast(tensor, root, name, process_set, out)


@runs_plain
def broadcast(
    tensor: AnyArray,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> AnyArray:
    """Returns the root's `tensor` on every rank.

    Args:
        tensor: as for `allreduce`. Only the values of the root are sent, but all ranks
            must pass the same dtype and shape.
        root_rank: the sender's rank in the world, even if a process set is given.
        name: the name of the operation, equal on all ranks.
        process_set: the ranks that take part; this rank must be among them.
        out: receives the result, as for `allreduce`. `out` may be `tensor` itself.

    Raises: as `allreduce`.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.broadcast(np.arange(3), root_rank=0).tolist()
        [0, 1, 2]
    """
    root = lane.root_in_set("broadcast", root_rank, process_set)
    return _broadcast(tensor, root, name, process_set, out, waits=True).wait()


def _broadcast(
    tensor: AnyArray,
    root: int,
    name: str | None,
    process_set: ProcessSet,
    out: AnyArray,
    *,
    waits: bool = False,
) -> Handle:
    given = to_operand("broadcast", name, tensor)
    return submit(
        "broadcast",
        name,
        [given],
        [given.array.shape],
        as_list(out),
        process_set,
        pick=first,
        root=root,
        waits=waits,
    )


def alltoall_async(
    tensor: AnyArray,
    splits: AnyArray = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> Handle:
    """Submits an `alltoall` and returns its handle immediately."""
    return _alltoall(tensor, splits, name, process_set, out)


@runs_plain
def alltoall(
    tensor: AnyArray,
    splits: AnyArray = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> AnyArray:
    """Sends a part of the rows to each rank, and returns the rows for this rank.

    Args:
        tensor: as for `allgather`.
        splits: the number of rows for each rank, in the order of the ranks. With None,
            all ranks receive equally many rows.
        name: the name of the operation, equal on all ranks.
        process_set: the ranks that take part; this rank must be among them.
        out: receives the result, as for `allgather`.

    Returns:
        The received rows, in the order of the ranks. With `splits`, a pair: the rows,
        and an int32 array with the number of rows from each rank.

    Raises: as `allreduce`; ValueError also if the sum of `splits` is not the number of
        rows.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.alltoall(np.arange(3)).tolist()
        [0, 1, 2]
    """
    return _alltoall(tensor, splits, name, process_set, out, waits=True).wait()


def _alltoall(
    tensor: AnyArray,
    splits: AnyArray,
    name: str | None,
    process_set: ProcessSet,
    out: AnyArray,
    *,
    waits: bool = False,
) -> Handle:
    def pick(made: list[AnyArray], received: list[list[int]]) -> AnyArray:
        return made[0] if splits is None else (made[0], np.array(received[0], np.int32))

    return submit_ragged(
        "alltoall",
        name,
        operands("alltoall", name, [tensor]),
        as_list(out),
        process_set,
        pick=pick,
        splits=[] if splits is None else lane.parse_splits("alltoall", name, splits),
        waits=waits,
    )


def barrier(
    *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Waits until all ranks of the process set have called `barrier`.

    Raises:
        NotInitialized: before ringjax.init().
        Stalled: a rank has not called `barrier` in time.
        PeerLost: a rank is lost.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.barrier()
    """
    lane.submit("barrier", name, [], [], lambda _: None, process_set, waits=True).wait()
