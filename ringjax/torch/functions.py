"""Horovod's functions on whole models, optimizers and Python objects.

Objects travel over `ringjax.eager.objects`. As in Horovod an object of any type may be
sent, so what is not plain data is pickled: a rank runs code that its sender chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringjax import runtime
from ringjax.eager import objects
from ringjax.torch.movement import broadcast_async_
from ringjax.world.process_set import ProcessSet, global_process_set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Gives every rank the root's values, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, a dict or an iterable
            of tensors or of pairs of a name and a tensor.
        root_rank: the rank that has the values.

    Raises:
        ValueError: `params` is none of these.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        # In an order that does not depend on how the dict was filled.
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | Tensor):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"broadcast_parameters: invalid params of type {type(params)}")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
) -> None:
    """Gives every rank the root's optimizer state and options.

    Every rank ends with the state of the root: for the parameters for which the root
    has some, and with all options that the root has, such as the ``initial_lr`` of a
    scheduler. If the root has made no step, no rank has state.

    Args:
        optimizer: of any kind but LBFGS, also a `DistributedOptimizer`.
        root_rank: the rank that has the state.
        model: not needed; for programs that were written for Horovod.

    Raises:
        ValueError: it is an LBFGS, or the ranks' optimizers are of different classes or
            have other parameters. On every rank.
        HorovodInternalError: a rank is gone.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(2, 1).parameters())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = runtime.rank() == root_rank
    tensors: list[Tensor] = []

    def mark(tensor: Tensor) -> _Mark:
        tensors.append(tensor)
        on_cpu = tensor.device.type == "cpu"
        return _Mark(tensor.shape, tensor.dtype, on_cpu)

    kind, state = _kind(optimizer), None
    if is_root:
        state = tree_map_only(Tensor, mark, optimizer.state_dict())
    root_kind, state = broadcast_object((kind, state), root_rank, "optimizer_state")
    kinds = allgather_object(kind, "optimizer_state.kinds")
    for rank, other in enumerate(kinds):
        for one, two in zip_longest(root_kind, other, fillvalue="no more parameters"):
            if one != two:
                raise ValueError(
                    f"broadcast_optimizer_state: the optimizer of rank {root_rank} has "
                    f"{one}, that of rank {rank} has {two}"
                )
    if is_root:
        _broadcast_all(tensors, root_rank)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device if parameters else "cpu"

    def room(mark: _Mark) -> Tensor:
        where = "cpu" if mark.on_cpu else device
        tensors.append(torch.empty(mark.shape, dtype=mark.dtype, device=where))
        return tensors[-1]

    state = tree_map_only(_Mark, room, state)
    _broadcast_all(tensors, root_rank)
    _load(optimizer, state)


@dataclass(frozen=True)
class _Mark:
    """A placeholder for a tensor in the state dict that is sent as an object."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def _kind(optimizer: torch.optim.Optimizer) -> list[str]:
    """The class and the parameters, for comparison and for errors."""
    name = getattr(optimizer, "plain_class", type(optimizer)).__name__
    return [
        f"the class {name}",
        *(
            f"the shape {tuple(p.shape)} for parameter {j} of group {i}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        ),
    ]


def _broadcast_all(tensors: list[Tensor], root_rank: int) -> None:
    pairs = [(f"optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        handle.wait()


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a state dict into the dicts that the optimizer already has.

    `load_state_dict` makes new dicts of options and state. A scheduler may hold the
    optimizer that a DistributedOptimizer was made from, which shares both dicts. And
    `load_state_dict` casts state to the dtype of its parameter; here a tensor of state
    keeps the dtype that it has on the root.
    """
    groups, states = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    for kept, loaded in zip(groups, optimizer.param_groups, strict=True):
        if kept is not loaded:
            kept.clear()
            kept.update(loaded)
    if states is not optimizer.state:
        states.clear()
        states.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, states
    for number, entries in optimizer.state_dict()["state"].items():
        for name, value in state["state"][number].items():
            if isinstance(value, Tensor) and entries[name].dtype != value.dtype:
                entries[name] = value


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank: there the same, elsewhere a copy.

    Any object that cloudpickle can pickle may be sent; receiving one runs code that the
    root chose. `ringjax.broadcast_object` takes plain data only, unless it is asked.

    Args:
        obj: looked at on the root only.
        root_rank: the sender's rank in the world.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.

    Raises:
        TypeError: the root's object cannot be pickled; on every rank.
        HorovodInternalError: a rank is gone.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    return objects.broadcast_pickled(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, in their order; see `broadcast_object`.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("ready") == ["ready"] * hvd.size()
        True
    """
    return objects.allgather_object(obj, name, allow_pickle=True)
