"""Horovod's functions on whole models, optimizers and Python objects.

Objects travel over `ringjax.eager.objects`. As in Horovod an object of any type may be
sent, so what is not plain data is pickled: a rank runs code that its sender chose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ringjax.eager import objects
from ringjax.runtime import ProcessSet, global_process_set
from ringjax.torch.movement import broadcast_async_


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
    """Gives every rank the root's optimizer state and options, in place.

    Where there is no state yet, it is created by a step with gradients of zero; the
    parameters stay as they are.

    Args:
        optimizer: of any kind but LBFGS, also a `DistributedOptimizer`.
        root_rank: the rank that has the state.
        model: to find embeddings whose gradients are sparse.

    Raises:
        ValueError: it is an LBFGS.
        HorovodInternalError: the ranks' optimizers differ, or a rank is gone.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(2, 1).parameters())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    if not state["state"]:
        _create_state(optimizer, model)
        state = optimizer.state_dict()
    tensors, scalars = [], []
    for key, holder, entry, value in _entries(optimizer, state):
        if isinstance(value, Tensor):
            tensors.append((key, value))
        else:
            scalars.append((key, holder, entry, value))
    broadcast_parameters(tensors, root_rank)
    values = {key: value for key, _, _, value in scalars}
    sent = broadcast_object(values, root_rank, "optimizer_state")
    for key, holder, entry, _ in scalars:
        if key in sent:
            holder[entry] = sent[key]


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


def _create_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None
) -> None:
    sparse = {
        id(parameter)
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in parameters if p.requires_grad]
    takes_sparse = isinstance(optimizer, torch.optim.SGD)
    for parameter in trained:
        zeros = torch.zeros_like(parameter.data)
        if isinstance(optimizer, torch.optim.SparseAdam) or (
            takes_sparse and id(parameter) in sparse
        ):
            zeros = zeros.to_sparse()
        parameter.grad = zeros
    before = [parameter.detach().clone() for parameter in trained]
    # Not the step of a DistributedOptimizer, which would wait for the other ranks.
    getattr(optimizer, "plain_class", type(optimizer)).step(optimizer)
    with torch.no_grad():
        for parameter, value in zip(trained, before, strict=True):
            parameter.copy_(value)  # weight decay has changed it


def _entries(
    optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """All options and pieces of state: key, the dict that holds it, its name there."""
    seen: Counter[str] = Counter()
    for index, group in enumerate(state["param_groups"]):
        for option, value in group.items():
            if option != "params":
                holder = optimizer.param_groups[index]
                yield f"{option}.{index}", holder, option, value
        for number in group["params"]:
            # A parameter that is not trained has none.
            entries = state["state"].get(number, {})
            for name, value in entries.items():
                seen[name] += 1
                yield f"{name}.{seen[name]}", entries, name, value
