"""broadcast_optimizer_state: copies the optimizer state of one rank to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringjax import runtime
from ringjax.eager import objects
from ringjax.torch.movement import broadcast_async_
from ringjax.world.process_set import global_process_set


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
) -> None:
    """Gives every rank the state and the options of the root's optimizer.

    The options are all entries of `param_groups`, also the ``initial_lr`` of a
    scheduler. A parameter that has no state on the root has no state on any rank.
    Before its first step the root has no state at all.

    Args:
        optimizer: any optimizer but LBFGS, also a `DistributedOptimizer`.
        root_rank: the rank that has the state.
        model: accepted and ignored; Horovod has this argument.

    Raises:
        ValueError: the optimizer is an LBFGS, or the optimizers of two ranks differ in
            their class or in the shapes of their parameters. All ranks raise it.
        HorovodInternalError: a rank is lost.

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

    def take_out(tensor: Tensor) -> _StateTensor:
        tensors.append(tensor)
        on_cpu = tensor.device.type == "cpu"
        return _StateTensor(tensor.shape, tensor.dtype, on_cpu)

    # The state is sent as an object with placeholders, then its tensors one by one.
    description, state = _describe(optimizer), None
    if is_root:
        state = tree_map_only(Tensor, take_out, optimizer.state_dict())
    expected, state = objects.broadcast_pickled(
        (description, state), root_rank, "optimizer_state", global_process_set
    )
    found = objects.allgather_object(
        description, "optimizer_state.kinds", allow_pickle=True
    )
    for rank, lines in enumerate(found):
        for one, two in zip_longest(expected, lines, fillvalue="no more parameters"):
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

    def allocate(spec: _StateTensor) -> Tensor:
        place = "cpu" if spec.on_cpu else device
        tensors.append(torch.empty(spec.shape, dtype=spec.dtype, device=place))
        return tensors[-1]

    state = tree_map_only(_StateTensor, allocate, state)
    _broadcast_all(tensors, root_rank)
    _load(optimizer, state)


@dataclass(frozen=True)
class _StateTensor:
    """A placeholder for a tensor, in a state dict that is sent as an object."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def _describe(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describes an optimizer's class and parameters, to compare them between ranks."""
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

    A scheduler may hold the plain optimizer of a DistributedOptimizer, which shares the
    dicts of options and of state. `load_state_dict` replaces these dicts, so this
    function fills them again and puts them back. `load_state_dict` also casts a state
    to the dtype of its parameter; here a state keeps the dtype that it has on the root.
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
