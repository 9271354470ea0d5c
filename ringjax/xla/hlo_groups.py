"""Finds the groups of devices in which the collectives of a compiled program run.

A device is given by its position in the device assignment of the executable. A
collective that is not understood is refused: if a group were missing here, XLA would
make its communicator unprepared (see priming.py). This module uses no JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ringjax.errors import InvalidArgument
from ringjax.xla import replica_groups
from ringjax.xla.replica_groups import Group

_MAX_COUNT = 2**31 - 1  # XLA passes counts and lengths to MPI as a C int

# The opcodes that communicate. Those of `_GLOBAL_IDS` may number devices globally.
_REDUCING = ("all-reduce", "reduce-scatter")
_GLOBAL_IDS = (*_REDUCING, "all-gather")
_PERMUTE = "collective-permute"
_OTHERS = ("all-to-all", "ragged-all-to-all", "collective-broadcast", _PERMUTE)

_SIZES = re.compile(r"\b(replica_count|num_partitions)=(\d+)")
_OPCODE = re.compile(
    r" ((?:ragged-)?all-[a-z-]+|reduce-scatter[a-z-]*|collective-[a-z-]+)\("
)
_HEAD = re.compile(r"\s*(?:ROOT )?%?(\S+) = (\([^\"%]*\)|[^\s(]+)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([^\]]*)\]")


def groups_of(text: str) -> list[Group]:
    r"""Returns the groups of device positions in which a program communicates.

    Args:
        text: the optimised HLO module, as `as_text()` of a compiled program returns it.

    Returns:
        The groups in ascending order, each once. The order of the positions in a group
        is the order of the ranks in its communicator. XLA makes communicators of one
        device, too, so the list includes groups of one position.

    Raises:
        InvalidArgument: a collective is not understood, or its data are too long for
            XLA's calls of MPI. The text names the instruction.

    Example:
        >>> groups_of(
        ...     "HloModule m, num_partitions=4\n"
        ...     "  %a = f32[8]{0} all-reduce(%p), channel_id=1, "
        ...     "replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true"
        ... )
        [(0, 2), (1, 3)]
    """
    sizes = {name: int(size) for name, size in _SIZES.findall(text.partition("\n")[0])}
    replicas = sizes.get("replica_count", 1)
    partitions = sizes.get("num_partitions", 1)
    found: set[Group] = set()
    for collective in _collectives(text):
        groups = collective.groups(replicas, partitions)
        collective.check_length(groups)
        found.update(groups)
    return sorted(found)


def _collectives(text: str) -> Iterator[_HloCollective]:
    for match in _OPCODE.finditer(text):
        if match[1].endswith(("-done", "-update")):
            continue
        start, end = (
            text.rfind("\n", 0, match.start()) + 1,
            text.find("\n", match.end()),
        )
        before = text[start : match.start()]
        if before.replace(r"\"", "").count('"') % 2:
            continue  # the match is inside of a string, such as a name in the metadata
        head = _HEAD.fullmatch(before)
        if head is None:
            raise InvalidArgument(
                "it is not known which devices communicate in the HLO instruction "
                f"{text[start : match.end() + 200].partition(chr(10))[0].strip()!r}"
            )
        rest = _STRING.sub('""', text[match.end() : end if end >= 0 else None])
        yield _HloCollective(head[1], head[2], match[1].removesuffix("-start"), rest)


@dataclass(frozen=True)
class _HloCollective:
    """An instruction that communicates. `rest` is its line from the operands on."""

    name: str
    shape: str
    opcode: str
    rest: str

    def _refused(self, why: str) -> InvalidArgument:
        shape = self.shape if len(self.shape) < 200 else f"{self.shape[:200]}..."
        return InvalidArgument(
            f"the HLO instruction %{self.name} = {shape} {self.opcode}(...) {why}"
        )

    @cached_property
    def _has_channel(self) -> bool:
        return ", channel_id=" in self.rest

    def groups(self, replicas: int, partitions: int) -> list[Group]:
        """Returns the groups of device positions, which number replicas * partitions.

        Position r * partitions + p runs partition p of replica r. The attributes say
        which of the three the notation numbers, as in XLA's GetCollectiveOpGroupMode.
        """
        everything = replicas * partitions
        counted = partitions if self._has_channel else replicas
        if self.opcode in _GLOBAL_IDS and self._has_channel:
            if ", use_global_device_ids=true" in self.rest:
                return self._numbered(everything)
            if self._numbered(replicas) == [(0,)]:  # replicas, in all their partitions
                return [tuple(range(partitions))]
            counted = replicas
        elif self.opcode not in (*_GLOBAL_IDS, *_OTHERS):
            raise self._refused("is of a kind that is not known here")
        groups = self._numbered(counted)
        if counted == everything:
            return groups
        if counted > 1:
            raise self._refused(
                f"combines {replicas} replicas, {partitions} partitions"
            )
        return [(position,) for position in range(everything)]

    def _numbered(self, count: int) -> list[Group]:
        """Returns the groups of numbers below `count` that the instruction names."""
        if self.opcode == _PERMUTE:  # its sources and targets are in one communicator
            return [tuple(range(count))]
        _, _, text = self.rest.partition(", replica_groups=")
        try:
            groups, length = replica_groups.read(text, count)
            if text[length : length + 2] not in ("", ", "):
                raise ValueError("the notation is not known")
        except ValueError as error:
            raise self._refused(f"has groups {text[:200]!r}: {error}") from error
        return groups

    def check_length(self, groups: Sequence[Group]) -> None:
        """Raises InvalidArgument if a count or a length of a call exceeds a C int."""
        ranks = min(map(len, groups))
        # A result that is an array, not a tuple, has one part of each rank.
        whole = not self.shape.startswith("(")
        divided = self.opcode == "all-gather" or (whole and self.opcode == "all-to-all")
        for elements, width in self._arrays():
            unit = "elements" if self.opcode in _GLOBAL_IDS else "bytes"
            size = elements * (1 if self.opcode in _GLOBAL_IDS else width)
            if size // (ranks if divided else 1) > _MAX_COUNT:
                raise self._refused(
                    f"sends more than {_MAX_COUNT} {unit} at once, which XLA's calls "
                    "of MPI cannot: split the array"
                )

    def _arrays(self) -> Iterator[tuple[int, int]]:
        """Yields the number of elements, and the bytes of each, of each result."""
        for bits, dimensions in _ARRAY.findall(self.shape):
            sizes = [size.strip("<= ") for size in dimensions.split(",") if size]
            if not all(size.isdecimal() for size in sizes):
                raise self._refused("has a result whose size is not known")
            yield math.prod(map(int, sizes)), max(1, int(bits or 8) // 8)
