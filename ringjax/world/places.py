"""Where the program of this rank is, from looks at its main thread."""

from __future__ import annotations

import gc
import time
import weakref
from collections import defaultdict
from typing import Any

from ringjax.monitor import locations
from ringjax.world.whereabouts import doing

LOOK = 0.05  # seconds between two looks at the program
_KEPT = 10.0  # seconds
_MOST = 2.0  # seconds that one look stands for: perhaps nobody wanted to know before


class Places:
    """Some looks: later ones count for more, as older ones are halved now and then.

    Each stands for the time since the one before: while the interpreter is held by what
    the program does, nobody can look.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str, float] = defaultdict(float)
        self._looked = time.monotonic()
        self._collecting = self._collected = 0.0
        self._listens = False

    def look(self) -> None:
        """Takes note of the line where the program is now."""
        if not self._listens:
            self._listens = True
            gc.callbacks.append(_listener(weakref.WeakMethod(self._on_garbage)))
        now = time.monotonic()
        spent, self._looked = min(now - self._looked, _MOST), now
        collected, self._collected = min(self._collected, spent), 0.0
        self._seen[doing()] += spent - collected
        self._seen[locations.GARBAGE_COLLECTION] += collected
        if sum(self._seen.values()) >= _KEPT:
            for place in list(self._seen):
                self._seen[place] /= 2
                if self._seen[place] < LOOK / 4:
                    del self._seen[place]

    @property
    def shares(self) -> str:
        """The places with the largest shares, as `monitor.locations.pack_shares`."""
        return locations.pack_shares(self._seen)

    def _on_garbage(self, phase: str) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting = now
        elif self._collecting:
            self._collected += now - self._collecting
            self._collecting = 0.0


def _listener(method: weakref.WeakMethod[Any]) -> Any:
    """A callback of the collector that ends with the object it is for."""

    def hear(phase: str, info: dict[str, int]) -> None:
        del info
        call = method()
        if call is not None:
            call(phase)
        elif hear in gc.callbacks:
            gc.callbacks.remove(hear)

    return hear
