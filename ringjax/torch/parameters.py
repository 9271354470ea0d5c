"""Finds the names of an optimizer's parameters, and the groups to reduce together.

The checks and their error texts are Horovod's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from ringjax.horovod.functions import split_list

# The type of an optimizer's `param_groups`: each dict has parameters and options.
ParamGroups: TypeAlias = list[dict[str, Any]]
# The parameters whose gradients one operation reduces: a single parameter, or a group.
Unit = tuple[Tensor, ...]


def parameter_names(
    param_groups: ParamGroups, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Returns the name of every parameter of an optimizer.

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
    param_groups: ParamGroups,
    groups: Sequence[Sequence[Tensor]] | int | None,
    name_of: dict[Tensor, str],
    broadcast_names: Callable[[list[str]], list[str]],
) -> list[Unit]:
    """Returns the groups of parameters that the user wants to be reduced together.

    Parameters in none of these groups are reduced one by one. Parameters that require
    no gradient are left out of the groups.

    Args:
        groups: None, lists of parameters, or the number of groups.
        broadcast_names: returns the names of the first rank. With a number of groups,
            all ranks must cut equal lists, but the orders of their parameters may
            differ.

    Raises:
        ValueError: `groups` is something else, or has a parameter twice.
    """
    if groups is None:
        return []
    trainable = [
        p for group in param_groups for p in group["params"] if p.requires_grad
    ]
    if isinstance(groups, list | tuple):
        members = [p for group in groups for p in group]
        if not all(isinstance(p, Tensor) for p in members):
            raise ValueError("groups must consist of torch.Tensor.")
        if len(set(members)) < len(members):
            raise ValueError("A parameter can only appear once in groups.")
        known = set(trainable)
        units = [tuple(p for p in group if p in known) for group in groups]
    else:
        if isinstance(groups, bool) or not isinstance(groups, int) or groups <= 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of "
                "torch.Tensor."
            )
        names = broadcast_names([name_of[p] for p in trainable])
        index = {name: i for i, name in enumerate(names)}
        trainable.sort(key=lambda p: index.get(name_of[p], len(index)))
        units = [tuple(part) for part in split_list(trainable, groups)]
    return [unit for unit in units if unit]
