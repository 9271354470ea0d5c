"""Which attributes of a state a program donates, seen from what happens to its arrays.

An array that was donated to a compiled step has no memory any more, so a commit must
have copied it before. Whether it must shows by comparing two commits: the arrays of the
earlier one are deleted (donated), or others have taken their place (not donated).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any

from ringjax.elastic import values

_log = logging.getLogger("ringjax.elastic")


class _DonationHabit(enum.Enum):
    UNKNOWN = enum.auto()
    KEEPS = enum.auto()
    DONATES = enum.auto()


class Donation:
    """What is known of the attributes of one state."""

    def __init__(self) -> None:
        self._habits: dict[str, _DonationHabit] = {}
        self._seen: dict[str, list[Any]] = {}

    def possible(self, name: str) -> bool:
        """Whether the next step may take the memory of this attribute's arrays."""
        return (
            self._habits.get(name, _DonationHabit.UNKNOWN) is not _DonationHabit.KEEPS
        )

    def names_to_copy(self, attributes: Mapping[str, Any]) -> set[str]:
        """Names of those that a commit must copy now."""
        part = values.jax_part()
        for name, value in attributes.items():
            before, now = self._seen.get(name, []), values.jax_arrays(value)
            if any(part.is_deleted(array) for array in before):
                self._learn(name, _DonationHabit.DONATES)
            elif [*map(id, before)] != [*map(id, now)] and before:
                self._learn(name, _DonationHabit.KEEPS)
            self._seen[name] = now
        return {name for name in attributes if self.possible(name)}

    def witness(self, attributes: Mapping[str, Any]) -> None:
        """These are what the next step is given."""
        self._seen = {n: values.jax_arrays(value) for n, value in attributes.items()}

    def forget(self) -> None:
        """The present arrays say nothing: no step has made them."""
        self._seen = {}

    def _learn(self, name: str, habit: _DonationHabit) -> None:
        if (
            self._habits.get(name) is _DonationHabit.DONATES
            or self._habits.get(name) is habit
        ):
            return
        self._habits[name] = habit
        if habit is _DonationHabit.DONATES:
            _log.debug("state.%s is donated by the step: each commit copies it", name)
