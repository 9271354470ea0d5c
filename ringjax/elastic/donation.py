"""Detects which attributes of a state a program donates to its compiled step.

A donated array has no memory any more, so a commit must have copied the array before.
Two consecutive commits show whether copies are needed. If the arrays of the earlier
commit are deleted, the program donates. If other arrays have replaced these arrays, it
does not.
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
    """The donation habits of the attributes of one state."""

    def __init__(self) -> None:
        self._habits: dict[str, _DonationHabit] = {}
        self._seen: dict[str, list[Any]] = {}

    def is_possible(self, name: str) -> bool:
        """Returns whether the next step may donate arrays of this attribute."""
        habit = self._habits.get(name, _DonationHabit.UNKNOWN)
        return habit is not _DonationHabit.KEEPS

    def names_to_copy(self, attributes: Mapping[str, object]) -> set[str]:
        """Compares with the previous commit; returns names of attributes to copy."""
        part = values.jax_part()
        for name, value in attributes.items():
            before, now = self._seen.get(name, []), values.jax_arrays(value)
            if any(part.is_deleted(array) for array in before):
                self._set_habit(name, _DonationHabit.DONATES)
            elif [*map(id, before)] != [*map(id, now)] and before:
                self._set_habit(name, _DonationHabit.KEEPS)
            self._seen[name] = now
        return {name for name in attributes if self.is_possible(name)}

    def record_inputs(self, attributes: Mapping[str, object]) -> None:
        """Records the arrays that the next step gets."""
        self._seen = {n: values.jax_arrays(value) for n, value in attributes.items()}

    def discard_inputs(self) -> None:
        """Discards the recorded arrays, because no step has got them."""
        self._seen = {}

    def _set_habit(self, name: str, habit: _DonationHabit) -> None:
        # A program that has donated once may donate again at any step.
        if self._habits.get(name) in (_DonationHabit.DONATES, habit):
            return
        self._habits[name] = habit
        if habit is _DonationHabit.DONATES:
            _log.debug("state.%s is donated by the step: each commit copies it", name)
