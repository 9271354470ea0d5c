"""Horovod's functions on whole models, optimizers and Python objects.

As in Horovod, objects of any type can be sent. Objects that are not plain data are
pickled, and a rank that unpickles an object runs code that the sender has chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ringjax.eager import objects
from ringjax.torch.movement import broadcast_async_
from ringjax.torch.optimizer_state import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from ringjax.world.process_set import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]], root_rank: int
) -> None:
    """Copies the values of the root into the tensors of every rank.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or another mapping of
            names to tensors or iterable of tensors or of (name, tensor) pairs.
        root_rank: the rank that has the values.

    Raises:
        ValueError: `params` is of another type.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        # Sort, because ranks may have filled their dicts in different orders.
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | Tensor):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"broadcast_parameters: invalid params of type {type(params)}")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        handle.wait()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object: the object itself on the root, copies on other ranks.

    The object may be anything that cloudpickle can pickle. A rank that receives it runs
    code that the root has chosen; `ringjax.broadcast_object` sends plain data only.

    Args:
        obj: the object to send. Only the argument of the root is used.
        root_rank: the root's rank in the world.
        name: the name of the operation, the same on all ranks.
        process_set: the ranks that take part; this rank must be among them.

    Raises:
        TypeError: the root's object cannot be pickled. All ranks raise it.
        HorovodInternalError: a rank is lost.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    return objects.broadcast_pickled(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, in the order of the ranks.

    The objects are sent as in `broadcast_object`.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("ready") == ["ready"] * hvd.size()
        True
    """
    return objects.allgather_object(obj, name, allow_pickle=True)
