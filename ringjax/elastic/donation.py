"""Detects which attributes of a state a program donates to its compiled step.

Donation frees the memory of an array, so each commit must copy donated attributes. Two
consecutive commits show whether an attribute is donated. If the arrays of the earlier
commit are deleted, the program donates the attribute. If the attribute has other arrays
now and the earlier arrays still exist, the program does not donate the attribute.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ringjax.elastic import values

_log = logging.getLogger("ringjax.elastic")


class Donation:
    """Records which attributes of one state the program donates."""

    def __init__(self) -> None:
        # Whether each attribute is donated. Unknown attributes have no entry yet.
        self._donates: dict[str, bool] = {}
        self._inputs: dict[str, list[Any]] = {}

    def is_possible(self, name: str) -> bool:
        """Returns whether the next step may donate arrays of this attribute."""
        return self._donates.get(name, True)

    def names_to_copy(self, attributes: Mapping[str, object]) -> set[str]:
        """Compares with the previous commit. Returns names of attributes to copy."""
        part = values.jax_part()
        for name, value in attributes.items():
            before, now = self._inputs.get(name, []), values.jax_arrays(value)
            if any(part.is_deleted(array) for array in before):
                # Copy at every later commit, too: the next step may donate again.
                if not self._donates.get(name):
                    _log.debug(
                        "state.%s is donated by the step: each commit copies it", name
                    )
                self._donates[name] = True
            elif before and [*map(id, before)] != [*map(id, now)]:
                self._donates.setdefault(name, False)
            self._inputs[name] = now
        return {name for name in attributes if self.is_possible(name)}

    def record_inputs(self, attributes: Mapping[str, object]) -> None:
        """Records the arrays that the next step receives."""
        self._inputs = {n: values.jax_arrays(value) for n, value in attributes.items()}

    def discard_inputs(self) -> None:
        """Discards the recorded arrays, because no step has received these arrays."""
        self._inputs = {}
