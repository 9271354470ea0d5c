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


class _Habit(enum.Enum):
    UNKNOWN = enum.auto()
    KEEPS = enum.auto()
    DONATES = enum.auto()


class Donation:
    """What is known of the attributes of one state."""

    def __init__(self) -> None:
        self._habits: dict[str, _Habit] = {}
        self._seen: dict[str, list[Any]] = {}

    def possible(self, name: str) -> bool:
        """Whether the next step may take the memory of this attribute's arrays."""
        return self._habits.get(name, _Habit.UNKNOWN) is not _Habit.KEEPS

    def to_be_copied(self, attributes: Mapping[str, Any]) -> set[str]:
        """Names of those that a commit must copy now."""
        part = values.jax_part()
        for name, value in attributes.items():
            before, now = self._seen.get(name, []), values.jax_arrays(value)
            if any(part.is_deleted(array) for array in before):
                self._learn(name, _Habit.DONATES)
            elif [*map(id, before)] != [*map(id, now)] and before:
                self._learn(name, _Habit.KEEPS)
            self._seen[name] = now
        return {name for name in attributes if self.possible(name)}

    def witness(self, attributes: Mapping[str, Any]) -> None:
        """These are what the next step is given."""
        self._seen = {n: values.jax_arrays(value) for n, value in attributes.items()}

    def forget(self) -> None:
        """The present arrays say nothing: no step has made them."""
        self._seen = {}

    def _learn(self, name: str, habit: _Habit) -> None:
        if self._habits.get(name) is _Habit.DONATES or self._habits.get(name) is habit:
            return
        self._habits[name] = habit
        if habit is _Habit.DONATES:
            _log.debug("state.%s is donated by the step: each commit copies it", name)
