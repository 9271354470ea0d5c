"""Horovod's operations that move PyTorch tensors, and those that only wait.

allgather, broadcast, alltoall; join and barrier. How they run is in operations.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringjax import runtime
from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.ops import Average
from ringjax.torch.autograd import Backward, apply_function
from ringjax.torch.compression import Compression
from ringjax.torch.operations import (
    differentiable_allgather,
    differentiable_allreduce,
    first_result,
    reduction_arguments,
    run_elementwise,
    submit_elementwise,
    submit_ragged,
)
from ringjax.world.process_set import ProcessSet, global_process_set


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allgather` that returns a handle at once; not differentiable."""
    return submit_ragged("allgather", [tensor], name, process_set, lambda r: r[0][0])


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args, Raises: as `allreduce`. The tensor is not 0-d, and the number of its rows may
    differ from rank to rank.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather(torch.tensor([7])).tolist()
        [7]

    Derivatives: this rank's rows of the average of all ranks' gradients, as Horovod has
    it.
    """
    return differentiable_allgather([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allgather_async` of several tensors as one operation; gives a tuple."""
    return submit_ragged(
        "allgather", tensors, name, process_set, lambda r: tuple(out for out, _ in r)
    )


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """`allgather` of several tensors as one operation; returns a tuple."""
    return differentiable_allgather(tensors, name, process_set)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`broadcast` that returns a handle at once; not differentiable."""
    call = _from(root_rank, process_set)
    return submit_elementwise(
        "broadcast", [tensor], name, process_set, first_result, call
    )


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`broadcast_` that returns a handle at once; leave the tensor alone until then."""
    call = _from(root_rank, process_set)
    return submit_elementwise(
        "broadcast", [tensor], name, process_set, first_result, call, True
    )


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`broadcast` into `tensor` itself, which is returned; not differentiable."""
    call = _from(root_rank, process_set)
    return run_elementwise("broadcast", [tensor], name, process_set, call, True)[0]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the tensor of `root_rank`, a rank of the world, on every rank.

    Args, Raises: as `allreduce`; ValueError also if the root is not in the set.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast(torch.arange(3), root_rank=0).tolist()
        [0, 1, 2]

    Derivatives: on the root the average of all ranks' gradients, as Horovod has it,
    elsewhere zero.
    """

    def rule(gradients: Sequence[Tensor]) -> list[Tensor]:
        call = reduction_arguments(None, Average, 1.0, 1.0)
        (mean,) = differentiable_allreduce(
            gradients, None, Compression.none, call, process_set
        )
        return [mean if runtime.rank() == root_rank else torch.zeros_like(mean)]

    def run(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        call = _from(root_rank, process_set)
        return run_elementwise("broadcast", tensors, name, process_set, call), rule

    return apply_function(run, [tensor])[0]


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`alltoall` that returns a handle at once; not differentiable.

    The handle gives the rows and how many came from each rank, also without `splits`.
    """
    return _exchange(tensor, splits, name, process_set)


def _exchange(
    tensor: Tensor,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    waits: bool = False,
) -> Handle:
    rows = [] if splits is None else lane.parse_splits("alltoall", name, splits)
    where = splits.device if isinstance(splits, Tensor) else "cpu"

    def pick(results: list[tuple[Tensor, list[int]]]) -> tuple[Tensor, Tensor]:
        ((out, received),) = results
        return out, torch.tensor(received, dtype=torch.int32, device=where)

    return submit_ragged("alltoall", [tensor], name, process_set, pick, rows, waits)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends a part of the rows to each rank, and returns the rows for this one.

    Args:
        tensor: not 0-d; the same dtype and the same dimensions but the first on all
            ranks.
        splits: how many rows go to each rank, a list or tensor of integers; None: all
            the same.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.

    Returns:
        The rows that came, in the order of the ranks; with `splits` also, as int32, how
        many came from each. Derivatives go the way back.

    Raises: as `allreduce`; ValueError also for splits that do not fit the rows.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> rows, received = hvd.alltoall(torch.arange(3), splits=[3])
        >>> rows.tolist(), received.tolist()
        ([0, 1, 2], [3])
    """

    def run(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        handle = _exchange(tensors[0], splits, name, process_set, waits=True)
        out, received = handle.wait()
        back = received.tolist()
        return (out, received), lambda gradients: [
            alltoall(gradients[0], back, process_set=process_set)[0]
        ]

    out, received = apply_function(run, [tensor])
    return out if splits is None else (out, received)


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks say so.

    Until then it takes part in what the others submit, with zeros or no rows.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The rank that was the last to join.

    Raises:
        HorovodInternalError: a rank is gone.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.join() in range(hvd.size())
        True
    """
    del device
    return lane.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set have come here.

    Raises:
        HorovodInternalError: a rank does not come, or is gone.
    """
    lane.submit(
        *("barrier", None, [], []),
        finish=lambda _: None,
        process_set=process_set,
        waits=True,
    ).wait()


def _from(root_rank: int, process_set: ProcessSet) -> lane.LaneOptions:
    return {"root": lane.root_in_set("broadcast", root_rank, process_set)}
