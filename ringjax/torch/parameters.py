"""The parameters of a distributed optimizer: their names, and which travel together.

Horovod's checks and texts. Knows no optimizer; how gradients travel is in reducer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ringjax.horovod.functions import split_list

# Parameters whose gradients are one operation: one, or a group.
Unit = tuple[Tensor, ...]


def parameter_names(
    param_groups: list[dict[str, Any]],
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> dict[Tensor, str]:
    """The name of every parameter of an optimizer.

    Raises:
        ValueError: `named_parameters` is no list of pairs, has a name twice, or lacks a
            parameter.
    """
    if named_parameters is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(param_groups)
            for j, p in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), "
            "usually produced by model.named_parameters()."
        )
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    found = {p: name for name, p in sorted(named, key=lambda item: item[0])}
    missing = [
        f"{list(p.shape)} (number {j} of group {i})"
        for i, group in enumerate(param_groups)
        for j, p in enumerate(group["params"])
        if p not in found
    ]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were "
            "not named: " + ", ".join(missing)
        )
    return found


def parameter_units(
    param_groups: list[dict[str, Any]],
    groups: Sequence[Sequence[Tensor]] | int | None,
    name_of: dict[Tensor, str],
    agreed: Callable[[list[str]], list[str]],
) -> list[Unit]:
    """What the user wants to be one operation each; other parameters travel alone.

    Args:
        param_groups: of the optimizer; only those that require gradients count.
        groups: None, lists of parameters, or into how many units to cut all of them.
        name_of: the name of every parameter.
        agreed: gives all ranks the same list of names, where their orders differ.

    Raises:
        ValueError: `groups` is something else, or has a parameter twice.
    """
    if groups is None:
        return []
    everyone = [p for group in param_groups for p in group["params"]]
    trainable = [p for p in everyone if p.requires_grad]
    if isinstance(groups, list | tuple):
        members = [p for group in groups for p in group]
        if not all(isinstance(p, Tensor) for p in members):
            raise ValueError("groups must consist of torch.Tensor.")
        if len(set(members)) < len(members):
            raise ValueError("A parameter can only appear once in groups.")
        mine = set(trainable)
        wanted = [tuple(p for p in group if p in mine) for group in groups]
    else:
        if isinstance(groups, bool) or not isinstance(groups, int) or groups <= 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of "
                "torch.Tensor."
            )
        place = {
            name: i for i, name in enumerate(agreed([name_of[p] for p in trainable]))
        }
        trainable.sort(key=lambda p: place.get(name_of[p], len(place)))
        wanted = [tuple(part) for part in split_list(trainable, groups)]
    return [unit for unit in wanted if unit]
