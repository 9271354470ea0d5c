"""Collects the small values that all ranks of an epoch send to each other.

The coordinator runs this code. Every rank makes the same exchanges in the same order,
so a sequence number identifies an exchange. The methods return the replies to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax.control.member import JsonObject, ranks_text

Replies = list[tuple[list[int], JsonObject]]  # pairs (ranks, message to these ranks)
_MAX_SECONDS = 86400


class Exchanges:
    """The exchanges of one epoch with `size` ranks.

    Example:
        >>> exchanges = Exchanges(2)
        >>> exchanges.put(1, {"number": 0, "value": "b", "seconds": 5}, now=0.0)
        []
        >>> exchanges.put(0, {"number": 0, "value": "a", "seconds": 5}, now=1.0)
        [([1, 0], {'type': 'values', 'number': 0, 'values': ['a', 'b']})]
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # The values that have arrived, by sequence number of the exchange, and by rank.
        self._values: dict[int, dict[int, Any]] = {}
        self._deadlines: dict[int, float] = {}
        self._departed: dict[int, str] = {}

    def put(self, rank: int, message: Mapping[str, Any], now: float) -> Replies:
        """Adds the value of a rank. The last value completes the exchange."""
        number, seconds = message.get("number"), message.get("seconds")
        if not isinstance(number, int):
            return []
        # Clamp before converting: a number in JSON may be NaN, or too large for float.
        limit = 0.0
        if isinstance(seconds, int | float):
            limit = float(max(0, min(seconds, _MAX_SECONDS)))
        values = self._values.setdefault(number, {})
        self._deadlines.setdefault(number, now + limit)
        values[rank] = message.get("value")
        if len(values) == self._size:
            self._remove(number)
            reply: JsonObject = {"type": "values", "number": number}
            ordered = [values[rank] for rank in range(self._size)]
            if all(value == ordered[0] for value in ordered):
                reply["same"] = ordered[0]
            else:
                reply["values"] = ordered
            return [(list(values), reply)]
        return self._fail(number) if self._departed else []

    def remove_rank(self, rank: int, why: str) -> Replies:
        """Fails the exchanges to which a rank that has left sent no value."""
        self._departed[rank] = why
        numbers = [n for n, values in self._values.items() if rank not in values]
        return [reply for number in numbers for reply in self._fail(number)]

    def expire(self, now: float) -> Replies:
        """Fails the exchanges whose timeout has expired."""
        numbers = [n for n, deadline in self._deadlines.items() if deadline <= now]
        return [reply for number in numbers for reply in self._fail(number)]

    def _fail(self, number: int) -> Replies:
        values = self._remove(number)
        missing = [rank for rank in range(self._size) if rank not in values]
        why = [f"rank {r} {self._departed[r]}" for r in missing if r in self._departed]
        text = "; ".join(why) or f"{ranks_text(missing)} did not take part"
        reply = {"type": "broken", "number": number, "text": text, "missing": missing}
        return [(list(values), reply)]

    def _remove(self, number: int) -> dict[int, Any]:
        del self._deadlines[number]
        return self._values.pop(number)
