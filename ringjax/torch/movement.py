"""Horovod's operations that move PyTorch tensors, and its `join` and `barrier`.

The operations are allgather, broadcast and alltoall; operations.py runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringjax import eager, runtime
from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.torch.autograd import Backward, apply_function
from ringjax.torch.operations import (
    allgather_tensors,
    allreduce_mean,
    first,
    run,
    submit,
    submit_ragged,
)
from ringjax.world.process_set import ProcessSet, global_process_set


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits `allgather` and returns a handle immediately; not differentiable."""
    return submit_ragged(
        "allgather", [tensor], name, process_set, pick=lambda results: results[0][0]
    )


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args, Raises: as `allreduce`. The tensor is not 0-d. The number of its rows may
    differ between ranks.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather(torch.tensor([7])).tolist()
        [7]

    Derivatives: this rank's rows of the average of all ranks' gradients, as in Horovod.
    """
    return allgather_tensors([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits one `allgather` of several tensors; its handle returns a tuple."""
    return submit_ragged(
        "allgather",
        tensors,
        name,
        process_set,
        pick=lambda r: tuple(out for out, _ in r),
    )


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Runs `allgather` of several tensors as one operation; returns a tuple."""
    return allgather_tensors(tensors, name, process_set)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits `broadcast` and returns a handle immediately; not differentiable."""
    options = _root_options(root_rank, process_set)
    return submit("broadcast", [tensor], name, process_set, options, pick=first)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits `broadcast_` and returns a handle immediately; not differentiable.

    Do not use the tensor before `synchronize` has returned.
    """
    options = _root_options(root_rank, process_set)
    return submit(
        "broadcast", [tensor], name, process_set, options, pick=first, in_place=True
    )


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Broadcasts into `tensor` itself and returns `tensor`; not differentiable."""
    options = _root_options(root_rank, process_set)
    return run("broadcast", [tensor], name, process_set, options, in_place=True)[0]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the tensor of `root_rank`, a rank of the world, on every rank.

    Args, Raises: as `allreduce`. ValueError also if the root is not in the process set.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast(torch.arange(3), root_rank=0).tolist()
        [0, 1, 2]

    Derivatives: on the root, the gradient is the average of all ranks' gradients, as in
    Horovod; on other ranks it is zero.
    """

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        (mean,) = allreduce_mean(gradients, process_set)
        return [mean if runtime.rank() == root_rank else torch.zeros_like(mean)]

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        options = _root_options(root_rank, process_set)
        return run("broadcast", tensors, name, process_set, options), backward

    return apply_function(forward, [tensor])[0]


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits `alltoall` and returns a handle immediately; not differentiable.

    The result is a pair of the rows and the numbers of rows that came from each rank,
    also without `splits`.
    """
    return _submit_alltoall(tensor, splits, name, process_set)


def _submit_alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None,
    name: str | None,
    process_set: ProcessSet,
    waits: bool = False,
) -> Handle:
    rows = [] if splits is None else lane.parse_splits("alltoall", name, splits)
    device = splits.device if isinstance(splits, Tensor) else "cpu"

    def pick(results: list[tuple[Tensor, list[int]]]) -> tuple[Tensor, Tensor]:
        ((out, received),) = results
        return out, torch.tensor(received, dtype=torch.int32, device=device)

    return submit_ragged(
        "alltoall", [tensor], name, process_set, pick=pick, splits=rows, waits=waits
    )


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends a part of the rows to each rank, and returns the rows for this rank.

    Args:
        tensor: a tensor that is not 0-d. On all ranks it has the same dtype and, but
            for the first, the same dimensions.
        splits: the numbers of rows that go to each rank, as a list or tensor of
            integers. If it is None, all parts are equal.
        name: the name of the operation, the same on all ranks.
        process_set: the ranks that take part; this rank must be among them.

    Returns:
        The received rows, in the order of the ranks. With `splits`, a pair of these
        rows and an int32 tensor of the numbers of rows that came from each rank.

    Raises: as `allreduce`. ValueError also for splits that do not fit the rows.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> rows, received = hvd.alltoall(torch.arange(3), splits=[3])
        >>> rows.tolist(), received.tolist()
        ([0, 1, 2], [3])

    Derivatives: the gradients of the received rows go back to the ranks that sent them.
    """

    def forward(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        handle = _submit_alltoall(tensors[0], splits, name, process_set, waits=True)
        out, received = handle.wait()
        back = received.tolist()

        def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
            return [alltoall(gradients[0], back, process_set=process_set)[0]]

        return (out, received), backward

    out, received = apply_function(forward, [tensor])
    return out if splits is None else (out, received)


def join(device: int = -1) -> int:
    """Announces that this rank has no more data, and waits until all ranks have joined.

    Until then this rank takes part in the operations of other ranks, with zeros in
    reductions and without rows in allgather and alltoall.

    Args:
        device: accepted and ignored; Horovod has this argument.

    Returns:
        The rank that was the last to join.

    Raises:
        HorovodInternalError: a rank is lost.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.join() in range(hvd.size())
        True
    """
    del device
    return lane.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the process set have called `barrier`.

    Raises:
        HorovodInternalError: a rank has not called `barrier` in time, or is lost.
    """
    eager.barrier(process_set=process_set)


def _root_options(root_rank: int, process_set: ProcessSet) -> lane.LaneOptions:
    return {"root": lane.root_in_set("broadcast", root_rank, process_set)}
