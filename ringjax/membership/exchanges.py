"""Small values that all ranks of an epoch give each other, at the server's side.

Every rank makes the same exchanges in the same order, so that numbers identify them.
Pure: what is to be sent to whom is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax.control.member import ranks_text

Replies = list[tuple[list[int], dict[str, Any]]]  # (ranks, message to them)


class Exchanges:
    """The exchanges of one epoch.

    Args:
        size: its ranks.

    Example:
        >>> exchanges = Exchanges(2)
        >>> exchanges.put(1, {"number": 0, "value": "b", "seconds": 5}, now=0.0)
        []
        >>> exchanges.put(0, {"number": 0, "value": "a", "seconds": 5}, now=1.0)
        [([1, 0], {'type': 'values', 'number': 0, 'values': ['a', 'b']})]
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[int, dict[int, Any]] = {}  # number -> rank -> value
        self._deadlines: dict[int, float] = {}
        self._gone: dict[int, str] = {}

    def put(self, rank: int, message: Mapping[str, Any], now: float) -> Replies:
        """A rank gives its value."""
        number, seconds = message.get("number"), message.get("seconds")
        if not isinstance(number, int):
            return []
        # Within a day: a number of JSON may be NaN, or beyond any float.
        limit = 0.0
        if isinstance(seconds, int | float):
            limit = float(max(0, min(seconds, 86400)))
        values = self._values.setdefault(number, {})
        self._deadlines.setdefault(number, now + limit)
        values[rank] = message.get("value")
        if len(values) == self._size:
            self._forget(number)
            ordered = [values[rank] for rank in range(self._size)]
            reply = {"type": "values", "number": number, "values": ordered}
            return [(list(values), reply)]
        return self._break_off(number) if self._gone else []

    def remove(self, rank: int, why: str) -> Replies:
        """A rank will take part in none any more."""
        self._gone[rank] = why
        numbers = [n for n, values in self._values.items() if rank not in values]
        return [reply for number in numbers for reply in self._break_off(number)]

    def sweep(self, now: float) -> Replies:
        """Ends those that take too long."""
        numbers = [n for n, deadline in self._deadlines.items() if deadline <= now]
        return [reply for number in numbers for reply in self._break_off(number)]

    def _break_off(self, number: int) -> Replies:
        """Tells the ranks that wait why it will not be complete."""
        values = self._forget(number)
        missing = [rank for rank in range(self._size) if rank not in values]
        why = [f"rank {r} {self._gone[r]}" for r in missing if r in self._gone]
        text = "; ".join(why) or f"{ranks_text(missing)} did not take part"
        reply = {"type": "broken", "number": number, "text": text, "missing": missing}
        return [(list(values), reply)]

    def _forget(self, number: int) -> dict[int, Any]:
        del self._deadlines[number]
        return self._values.pop(number)
