"""The settings that steps are tried with, in turns, and the one that wins.

Every step of a trial is a real step of the job: settings change what travels when, not
what is computed. All take turns within a round, so that a machine that is slow for a
while is slow for all of them. One wins if it was faster than the default in most
rounds, and by more than noise.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

LEAST_GAIN = 0.02  # of the default's time, that is worth to leave it
MOST_ROUNDS = 0.75  # in so many the winner must have been faster

Times = list[list[float]]  # seconds of a step: by round, by setting


@dataclass(frozen=True)
class Setting:
    """How gradients travel.

    Attributes:
        bucket_bytes: in one message.
        overlap_memory: bytes that are on their way at most.
        overlap: beside the backward pass, or after it; None: as the program says.
    """

    bucket_bytes: int
    overlap_memory: int
    overlap: bool | None = None

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
    """The setting that is tried where this is called; None: those of the job hold."""
    return _active.get()


@contextlib.contextmanager
def use_setting(setting: Setting | None) -> Iterator[None]:
    """Within it, `setting` holds."""
    token = _active.set(setting)
    try:
        yield
    finally:
        _active.reset(token)


def candidate_settings(default: Setting, overlapped: bool | None) -> list[Setting]:
    """What to try, the default first.

    Args:
        overlapped: whether the default overlaps; None: where that is not a choice.
    """
    # Without fusion some fusion is tried.
    bucket, memory = default.bucket_bytes or 25 << 20, default.overlap_memory
    beside = None if overlapped is None or overlapped else True
    others = [
        Setting(max(bucket // 5, 1), memory, beside),
        Setting(4 * bucket, max(8 * bucket, memory), beside),
    ]
    if overlapped is not None:
        others.insert(0, Setting(bucket, memory, not overlapped))
        others.insert(1, Setting(bucket, 4 * memory, beside))
    return [default, *others]


class Trials:
    """Says what the next step runs with, and hears how long it took.

    Args:
        settings: the default first.
        warmup: rounds that do not count.
        rounds: that do.

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
        """Whether all has been tried."""
        return self._steps >= (self._warmup + self._rounds) * len(self.settings)

    @property
    def setting(self) -> Setting:
        """Of the next step."""
        return self.settings[self._steps % len(self.settings)]

    def record_step(self, seconds: float) -> None:
        """How long the step took that had `setting`."""
        turn, which = divmod(self._steps, len(self.settings))
        self._steps += 1
        if turn < self._warmup:
            return
        if which == 0:
            self.times.append([])
        self.times[-1].append(seconds)

    def winner(self, times: Times) -> Setting:
        """The best, which is the default unless another is better beyond doubt.

        Args:
            times: as `times`, of the slowest rank each, so that all ranks agree.
        """
        typical = medians(times)
        for i in sorted(range(len(typical)), key=typical.__getitem__):
            faster = sum(row[i] < row[0] for row in times)
            gains = typical[i] <= (1 - LEAST_GAIN) * typical[0]
            if gains and faster >= MOST_ROUNDS * len(times):
                return self.settings[i]
        return self.settings[0]


def medians(times: Times) -> list[float]:
    """Seconds of each setting."""
    return [statistics.median(column) for column in zip(*times, strict=True)]


def to_json(setting: Setting) -> list[Any]:
    """For a file, or another rank."""
    return [setting.bucket_bytes, setting.overlap_memory, setting.overlap]


def from_json(value: object) -> Setting | None:
    """What `to_json` gave; None if it is something else, as of a damaged file."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    bucket, memory, overlap = value
    sizes = type(bucket) is int and type(memory) is int and bucket >= 0 and memory >= 0
    if not sizes or not (overlap is None or isinstance(overlap, bool)):
        return None
    return Setting(bucket, memory, overlap)
