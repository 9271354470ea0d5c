"""Stack sampler: the lines of code at which this rank's main thread spends its time.

The periodic counterpart of stack_probe.py, which answers single requests.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import defaultdict
from collections.abc import Callable

from ringjax.monitor import locations
from ringjax.world.stack_probe import main_thread_activity

SAMPLE_INTERVAL = 0.05  # seconds between two samples
_WINDOW = 10.0  # seconds of samples after which all weights are halved
_MAX_WEIGHT = (
    2.0  # seconds that one sample stands for at most, for example after a pause
)


class StackSampler:
    """Attributes the time between samples to the line where the main thread is.

    Recent samples count for more, because all weights are halved now and then. Each
    sample stands for the time since the sample before: while the program holds the
    interpreter's lock, no thread can take samples. Time in the garbage collector is
    counted apart.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._sampled_at = time.monotonic()
        self._collection_began = self._collection_seconds = 0.0
        self._has_callback = False

    def sample(self) -> None:
        """Adds the time since the last sample to the line where the program is now."""
        if not self._has_callback:
            self._has_callback = True
            gc.callbacks.append(_gc_callback(weakref.WeakMethod(self._on_collection)))
        now = time.monotonic()
        spent, self._sampled_at = min(now - self._sampled_at, _MAX_WEIGHT), now
        collected = min(self._collection_seconds, spent)
        self._collection_seconds = 0.0
        self._seconds[main_thread_activity()] += spent - collected
        self._seconds[locations.GARBAGE_COLLECTION] += collected
        if sum(self._seconds.values()) >= _WINDOW:
            for location in list(self._seconds):
                self._seconds[location] /= 2
                if self._seconds[location] < SAMPLE_INTERVAL / 4:
                    del self._seconds[location]

    @property
    def shares(self) -> str:
        """The lines with the largest shares, in the format of `monitor.locations`."""
        return locations.pack_shares(self._seconds)

    def _on_collection(self, phase: str) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collection_began = now
        elif self._collection_began:
            self._collection_seconds += now - self._collection_began
            self._collection_began = 0.0


def _gc_callback(
    method: weakref.WeakMethod[Callable[[str], None]],
) -> Callable[[str, dict[str, int]], None]:
    """Returns a callback for `gc` that unregisters itself when its sampler is gone."""

    def on_collection(phase: str, info: dict[str, int]) -> None:
        del info
        on_phase = method()
        if on_phase is not None:
            on_phase(phase)
        elif on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)

    return on_collection
