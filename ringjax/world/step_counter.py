"""Counts training steps: finds the call that occurs once in each step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

# The lane, operation, name, size in bytes and process set id of a call.
CallKind = tuple[str, str, str, int, int]
MAX_KINDS = 4096  # a program may put numbers into its names, so kinds are unbounded


def find_step_marker(counts: Counter[CallKind]) -> CallKind | None:
    """Returns the kind of call that ends a training step, or None without any calls.

    A step ends with that kind of call which has moved most bytes among all ranks of the
    world, usually the gradients. `counts` has the number of calls of each kind.
    """
    total = {kind: n * (kind[3] + 1) for kind, n in counts.items() if kind[4] == 0}
    return max(total, key=lambda kind: total[kind], default=None)


class StepCounter:
    """Cuts off the lines of a recorder after a given number of training steps.

    The attribute `over` is True if that many steps have ended.

    Example:
        >>> call = b'{"lane": "named", "op": "allreduce", "name": "x", "bytes": 4,'
        >>> call += b' "set": 0, "agreed": 1.0}' + bytes([10])
        >>> counter = StepCounter(2)
        >>> counter.cut(2 * call) == 2 * call, counter.over
        (True, False)
        >>> counter.cut(5 * call) == call, counter.over
        (True, True)
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._counts: Counter[CallKind] = Counter()
        self.over = False

    def cut(self, lines: bytes) -> bytes:
        """Returns the new recorder lines that belong to the first `steps` steps."""
        split = lines.splitlines(keepends=True)
        kinds = list(map(_kind, map(json.loads, split)))
        before = self._counts.copy()
        self._counts.update(kind for kind in kinds if kind is not None)
        marker = find_step_marker(self._counts)
        if marker is None or self._counts[marker] <= self._steps:
            self._drop_rare_kinds()
            return lines
        self.over = True
        missing = self._steps + 1 - before[marker]  # N + 1 markers enclose N steps
        ends = [end for end, kind in enumerate(kinds, 1) if kind == marker]
        # `missing` is not positive if these lines have made another kind the marker,
        # and earlier lines contain enough calls of this new marker.
        return b"".join(split[: ends[missing - 1] if missing > 0 else 0])

    def _drop_rare_kinds(self) -> None:
        if len(self._counts) > MAX_KINDS:
            self._counts = Counter(dict(self._counts.most_common(MAX_KINDS // 2)))


def _kind(call: Mapping[str, Any]) -> CallKind | None:
    if call["agreed"] is None:  # some ranks have not made this call
        return None
    return (call["lane"], call["op"], call["name"], call["bytes"], call["set"])
