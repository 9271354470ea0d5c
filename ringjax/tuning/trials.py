"""Tries settings of gradient communication in turns, and chooses the fastest one.

Every trial is a real step of the job: settings change the order and the time of
messages, but not the results. Each round tries all settings once, so that a slow phase
of a machine slows all settings. A setting replaces the default only if it was faster in
most rounds, and by more than noise.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

MIN_GAIN = 0.02  # least gain, as a share of the default's time
MIN_ROUNDS = 0.75  # share of the rounds in which the winner must be faster

Times = list[list[float]]  # seconds of a step by round, then by setting


@dataclass(frozen=True)
class Setting:
    """How gradients are sent: sizes of messages, bytes in flight, and overlap."""

    bucket_bytes: int  # the size of one message
    overlap_memory: int  # the largest number of bytes in flight at one time
    overlap: bool | None = None  # during the backward pass; None: the program decides

    def __str__(self) -> str:
        if self.overlap is False:
            return "after the backward pass, at once"
        text = f"buckets of {_size(self.bucket_bytes)}"
        text += f", {_size(self.overlap_memory)} on their way"
        return text + (", overlapped" if self.overlap else "")


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB"


_active: ContextVar[Setting | None] = ContextVar("ringjax_active", default=None)


def active_setting() -> Setting | None:
    """Returns the setting under trial; None if the job's settings are in use."""
    return _active.get()


@contextlib.contextmanager
def use_setting(setting: Setting | None) -> Iterator[None]:
    """Makes `setting` the result of `active_setting` within a `with` block."""
    token = _active.set(setting)
    try:
        yield
    finally:
        _active.reset(token)


def candidate_settings(default: Setting, overlapped: bool | None) -> list[Setting]:
    """Returns the settings to try. The first is the default.

    `overlapped` says whether the default overlaps; None if overlap is not a choice.
    """
    # A default of 0 means no buckets. The other settings then start from 25 MiB.
    bucket, memory = default.bucket_bytes or 25 << 20, default.overlap_memory
    overlap = None if overlapped is None or overlapped else True
    others = [
        Setting(max(bucket // 5, 1), memory, overlap),
        Setting(4 * bucket, max(8 * bucket, memory), overlap),
    ]
    if overlapped is not None:
        others.insert(0, Setting(bucket, memory, not overlapped))
        others.insert(1, Setting(bucket, 4 * memory, overlap))
    return [default, *others]


class Trials:
    """Decides the setting of each step, and records the step's duration.

    The first of the `settings` is the default. The first `warmup` rounds do not count,
    and the next `rounds` rounds count.

    Example:
        >>> few = Trials([Setting(25, 40), Setting(5, 40)], warmup=1, rounds=4)
        >>> while not few.finished:
        ...     few.record_step(0.1 if few.setting.bucket_bytes == 25 else 0.08)
        >>> few.winner(few.times).bucket_bytes
        5
    """

    def __init__(self, settings: Sequence[Setting], warmup: int, rounds: int) -> None:
        self.settings = list(settings)
        self._warmup, self._rounds = warmup, max(rounds, 1)
        self._steps = 0
        self.times: Times = []

    @property
    def finished(self) -> bool:
        """Whether all rounds have been completed."""
        return self._steps >= (self._warmup + self._rounds) * len(self.settings)

    @property
    def setting(self) -> Setting:
        """The setting that the next step must use."""
        return self.settings[self._steps % len(self.settings)]

    def record_step(self, seconds: float) -> None:
        """Records the duration of the step that used the current `setting`."""
        turn, index = divmod(self._steps, len(self.settings))
        self._steps += 1
        if turn < self._warmup:
            return
        if index == 0:
            self.times.append([])
        self.times[-1].append(seconds)

    def winner(self, times: Times) -> Setting:
        """Returns the fastest setting, or the default if none is clearly faster.

        All ranks choose one setting, because the argument has the `times` of the
        slowest rank.
        """
        typical = medians(times)
        for i in sorted(range(len(typical)), key=typical.__getitem__):
            faster = sum(row[i] < row[0] for row in times)
            gains = typical[i] <= (1 - MIN_GAIN) * typical[0]
            if gains and faster >= MIN_ROUNDS * len(times):
                return self.settings[i]
        return self.settings[0]


def medians(times: Times) -> list[float]:
    """Returns the median seconds of each setting."""
    return [statistics.median(column) for column in zip(*times, strict=True)]


def to_json(setting: Setting) -> list[int | bool | None]:
    """Converts a setting to a JSON value, for a file or another rank."""
    return [setting.bucket_bytes, setting.overlap_memory, setting.overlap]


def from_json(value: object) -> Setting | None:
    """Converts a result of `to_json` to a setting, or returns None if it is invalid."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    bucket, memory, overlap = value
    sizes = type(bucket) is int and type(memory) is int and bucket >= 0 and memory >= 0
    if not sizes or not (overlap is None or isinstance(overlap, bool)):
        return None
    return Setting(bucket, memory, overlap)
