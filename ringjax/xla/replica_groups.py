"""Reads XLA's notations of groups of devices, as they stand in the text of a module.

    {{0,1},{2,3}}                 lists; {} is one group of all
    [2,2]<=[2,2]T(1,0)            iota: the numbers from 0, reshaped and transposed
    mesh['x'=2,'y'=2] {'x'}       axes of a mesh; 'y':(2)4 is a part of an axis

XLA calls the second IotaReplicaGroupList and the third MeshAxesReplicaGroupList.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import numpy.typing as npt

Group = tuple[int, ...]
Array = npt.NDArray[np.int64]

_NUMBERS = r"\d+(?:,\d+)*"
_IOTA = rf"\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?"
_NAME = r"'?([^'=:,\[\]{}]+)'?"
_LISTS = re.compile(rf"\{{((?:\{{{_NUMBERS}\}},?)*)\}}")
_IOTA_LIST = re.compile(rf"\[(\d+),(\d+)\]<={_IOTA}")
_MESH = re.compile(
    rf"mesh\[([^\]]+)\](?:, device_ids=\((?:{_IOTA}|({_NUMBERS}))\))? \{{([^{{}}]*)\}}"
)
_AXIS = re.compile(rf"{_NAME}=(\d+)")
_PART = re.compile(rf"{_NAME}(?::\((\d+)\)(\d+))?")


def read(text: str, count: int) -> tuple[list[Group], int]:
    """Reads the notation with which `text` begins.

    Args:
        text: the groups, and what follows them.
        count: how many devices there are; their numbers are less.

    Returns:
        The groups, each in the order of its ranks, and the length of the notation.

    Raises:
        ValueError: the notation is not known, or contradicts itself or `count`.

    Example:
        >>> read("[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
        ([(0, 2), (1, 3)], 18)
    """
    if match := _LISTS.match(text):
        groups = [_numbers(part) for part in re.findall(_NUMBERS, match[1])]
        groups = groups or [tuple(range(count))]
    elif match := _IOTA_LIST.match(text):
        number, size, shape, order = match.groups()
        groups = _rows(_iota(shape, order).reshape(int(number), int(size)))
    elif match := _MESH.match(text):
        groups = _along_axes(*match.groups())
    else:
        raise ValueError("the notation is not known")
    members = list(itertools.chain(*groups))
    if len(set(members)) < len(members) or max(members, default=0) >= count:
        raise ValueError(f"they are no groups of {count} devices")
    return groups, match.end()


def _numbers(text: str) -> Group:
    return tuple(map(int, text.split(",")))


def _rows(array: Array) -> list[Group]:
    return [tuple(row) for row in array.tolist()]


def _iota(shape: str, order: str | None) -> Array:
    sizes = _numbers(shape)
    array = np.arange(math.prod(sizes)).reshape(sizes)
    return array if order is None else array.transpose(_numbers(order))


def _along_axes(
    mesh: str, shape: str | None, order: str | None, listed: str | None, parts: str
) -> list[Group]:
    """Returns the groups along axes, of which the last varies fastest in a group."""
    axes = [_match(_AXIS, axis) for axis in mesh.split(",")]
    sizes = {axis[1]: int(axis[2]) for axis in axes}
    devices = np.arange(math.prod(sizes.values()))
    if shape is not None:
        devices = _iota(shape, order)
    elif listed is not None:
        devices = np.array(_numbers(listed))
    wanted = [_bounds(part, sizes) for part in parts.split(",") if part]
    # Cut each axis where a part begins or ends.
    pieces: list[tuple[str, int, int]] = []
    for axis, size in sizes.items():
        ends = {end for name, *both in wanted if name == axis for end in both}
        cuts = sorted({1, size} | ends)
        pieces += [(axis, *pair) for pair in itertools.pairwise(cuts)]
    if any(begin < 1 or end % begin for _, begin, end in pieces):
        raise ValueError("the parts of an axis do not divide it")
    grouped = [
        index
        for name, first, last in wanted
        for index, (axis, begin, end) in enumerate(pieces)
        if name == axis and first <= begin and end <= last
    ]
    others = [index for index in range(len(pieces)) if index not in grouped]
    array = devices.reshape([end // begin for _, begin, end in pieces])
    size = math.prod(array.shape[index] for index in grouped)
    return _rows(array.transpose([*others, *grouped]).reshape(-1, size))


def _bounds(part: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """Returns an axis, and the products of its factors up to both ends of the part.

    The part 'x':(2)4 of an axis of 16 is the middle one of the factors 2, 4 and 2.
    """
    name, before, size = _match(_PART, part).groups()
    if name not in sizes:
        raise ValueError(f"the mesh has no axis {name}")
    first = int(before or 1)
    return name, first, first * int(size) if size else sizes[name]


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not known")
    return match
