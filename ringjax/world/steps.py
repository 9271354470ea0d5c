"""Where steps end, as far as that can be seen from the calls that repeat."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

# What a call is: lane, operation, name, bytes, process set.
Kind = tuple[str, str, str, int, int]
MOST_KINDS = 4096  # names may have numbers in them


def anchor(counts: Counter[Kind]) -> Kind | None:
    """The kind of call that comes once in each step.

    That with the most bytes in all, of those of the whole world; gradients, as a rule.

    Args:
        counts: of the calls in which all ranks had come.
    """
    total = {kind: n * (kind[3] + 1) for kind, n in counts.items() if kind[4] == 0}
    return max(total, key=lambda kind: total[kind], default=None)


class Steps:
    """Counts them in what the recorder tells.

    Args:
        wanted: how many.

    Example:
        >>> call = b'{"lane": "named", "op": "allreduce", "name": "x", "bytes": 4,'
        >>> call += b' "set": 0, "agreed": 1.0}' + bytes([10])
        >>> steps = Steps(2)
        >>> steps.within(2 * call) == 2 * call, steps.over
        (True, False)
        >>> steps.within(5 * call) == call, steps.over
        (True, True)
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._counts: Counter[Kind] = Counter()
        self.over = False

    def within(self, lines: bytes) -> bytes:
        """Those that belong to the steps that are wanted."""
        split = lines.splitlines(keepends=True)
        kinds = list(map(_kind, map(json.loads, split)))
        before = self._counts.copy()
        self._counts.update(kind for kind in kinds if kind is not None)
        found = anchor(self._counts)
        if found is None or self._counts[found] <= self._wanted:
            self._forget_some()
            return lines
        self.over = True
        missing = self._wanted + 1 - before[found]  # N steps have N + 1 ends
        ends = [at for at, kind in enumerate(kinds, 1) if kind == found]
        # None, if it was another kind that counted until now.
        return b"".join(split[: ends[missing - 1] if missing > 0 else 0])

    def _forget_some(self) -> None:
        if len(self._counts) > MOST_KINDS:
            self._counts = Counter(dict(self._counts.most_common(MOST_KINDS // 2)))


def _kind(call: dict[str, Any]) -> Kind | None:
    """None if not all ranks had come."""
    if call["agreed"] is None:
        return None
    return (call["lane"], call["op"], call["name"], call["bytes"], call["set"])
