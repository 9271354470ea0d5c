"""Checks the arguments that gradient tapes and optimizers of all frameworks share.

The errors have Horovod's text if Horovod checks the argument, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from ringjax.horovod.functions import split_list
from ringjax.ops import Adasum, Average, Sum

Groups: TypeAlias = Sequence[Sequence[Any]] | int | None
"""The number of operations for all gradients, or the variables of each operation."""


def check_reduction(op: int, predivide: float, passes: int = 1) -> None:
    """Raises a ValueError if the operator, the predivide factor or `passes` is wrong.

    `passes` is the argument `backward_passes_per_step`.
    """
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be Average, Sum or Adasum, not {op!r}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not predivide > 0.0:
        raise ValueError("gradient_predivide_factor must be > 0")
    if isinstance(passes, bool) or not (isinstance(passes, int) and passes > 0):
        raise ValueError("backward_passes_per_step must be > 0")


def check_groups(
    groups: Groups, num_groups: int, members: str, stacklevel: int
) -> Groups:
    """Checks and returns `groups`, or Horovod's former argument `num_groups`.

    The error names `members`, the class of the variables in the groups.
    """
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups`."
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
        groups = num_groups if groups is None else groups
    if isinstance(groups, list | tuple):
        valid = all(isinstance(group, list | tuple) for group in groups)
    elif isinstance(groups, int):
        valid = not isinstance(groups, bool) and groups > 0
    else:
        valid = groups is None
    if not valid:
        raise ValueError(
            f"groups should be a non-negative integer or a list of list of {members}."
        )
    return groups


def group_indices(
    groups: Groups,
    present: Sequence[int],
    index_of: Mapping[Hashable, int],
    key_of: Callable[[Any], Hashable],
) -> list[list[int]]:
    """Returns the indices of the gradients in each group.

    A number of groups divides the indices `present` evenly. Groups that list variables
    find each variable by its key in `index_of`, and leave out variables without an
    index.

    Example:
        >>> group_indices(2, [0, 2, 3], {}, id)
        [[0, 2], [3]]
    """
    if groups is None:
        return []
    if isinstance(groups, int):
        return [list(part) for part in split_list(present, groups)]
    units = [
        [index_of[key] for key in map(key_of, group) if key in index_of]
        for group in groups
    ]
    flat = [i for unit in units for i in unit]
    if len(set(flat)) < len(flat):
        raise ValueError("A variable can only appear once in groups.")
    return units
