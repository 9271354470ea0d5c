"""How this process has spent its time since it became a member of its job.

The library marks what makes no progress while it happens: compilations, checkpoints,
losses. The waiting times of calls come from the recorder of the native core, which
counts them anyway, so a step costs nothing here. `TimeSpent.report` combines both.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ringjax import _native
from ringjax.monitor.time_report import Progress, TimeReport
from ringjax.world.recorder import RECORDER_CAPACITY

_MAX_MARKS = 1024  # enough marks for the start of a program
_KEY = ("lane", "set", "op", "name", "bytes")
# The names of calls that begin and commit a training function, and are no step.
_CALLS_OF_RINGJAX = ("ringjax.", "elastic.")
_NUMBER = re.compile(r"\d+")
_Events = list[dict[str, Any]]


class _Mark(NamedTuple):
    """A part of the time, from `began` to `ended`. No two marks share a moment."""

    part: str
    began: float
    ended: float


class TimeSpent:
    """Adds up the time of this process by parts; see `TimeReport`. Thread-safe.

    Attributes:
        progress: what the program has told by `ringjax.progress`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._recorder: _native.Recorder | None = None
        self._before = 0.0  # seconds of waiting that the recorder had at the beginning
        self._compiled = 0.0  # seconds of compilations before the first step
        self._inside = 0  # how many blocks are open; inside of one nothing else counts
        self.progress: Progress | None = None
        self._reset(clock())

    def _reset(self, now: float) -> None:
        self._began = now
        self._first_step: float | None = None  # when the ranks were in step for once
        self._start = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._marks: deque[_Mark] = deque(maxlen=_MAX_MARKS)
        self._explained = 0.0  # seconds of waiting that another part includes
        self._losses: list[tuple[float, float]] = []
        self._loss_began: float | None = None
        self._committed: tuple[float, float] | None = None

    def begin(self, recorder: _native.Recorder) -> None:
        """Begins to count, because this process has become a member of its job."""
        with self._lock:
            self._recorder = recorder
            self._reset(self._clock())
            self._before = recorder.busy()[0]

    # -- marks -------------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Counts a block under `part`, with all that happens inside of it."""
        with self._lock:
            self._inside += 1
            outermost = self._inside == 1
            began, waited = self._clock(), self._waited()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if began < self._began:  # `init` was called again inside of the block
                    began, waited = self._began, self._before
                if outermost:
                    self._add(_Mark(part, began, self._clock()))
                    self._explained += self._waited() - waited

    def ended(self, part: str, seconds: float) -> None:
        """Counts the last `seconds` under `part`, with the marks inside of them.

        One compilation may contain others, which JAX reports first.
        """
        with self._lock:
            if self._inside:
                return
            now = self._clock()
            began = max(now - seconds, self._began)
            while self._marks and self._marks[-1].began >= began:
                inner = self._marks.pop()
                self._seconds[inner.part] -= inner.ended - inner.began
            if self._marks:
                began = max(began, self._marks[-1].ended)
            if now > began:
                self._add(_Mark(part, began, now))

    def _add(self, mark: _Mark) -> None:
        self._marks.append(mark)
        self._seconds[mark.part] += mark.ended - mark.began

    def begin_loss(self) -> None:
        """Marks the moment at which calls stop because the ranks change."""
        with self._lock:
            if self._loss_began is None:
                self._loss_began = self._clock()

    def end_loss(self) -> None:
        """Marks the moment at which calls go on, in a new epoch."""
        with self._lock:
            if self._loss_began is not None:
                self._losses.append((self._loss_began, self._clock()))
                self._loss_began = None

    def commit(self) -> None:
        """Marks the moment to which an error would lead back."""
        with self._lock:
            self._committed = self._clock(), self._counted()

    def repeat(self) -> None:
        """Counts what has made progress since the last commit as repeated."""
        with self._lock:
            self._find_first_step()
            if self._committed is not None and self._first_step is not None:
                then, counted = self._committed
                passed = self._clock() - then - (self._counted() - counted)
                self._seconds["repeated"] += max(0.0, passed)
            self._committed = None

    def _counted(self) -> float:
        return sum(self._seconds.values()) + self._waited() - self._explained

    def _waited(self) -> float:
        return 0.0 if self._recorder is None else self._recorder.busy()[0]

    # -- reports -----------------------------------------------------------------------

    def report(self, *, last: bool = False) -> TimeReport | None:
        """Returns the time until now, or None before `begin`.

        Args:
            last: whether the process is about to leave its job.
        """
        with self._lock:
            recorder, now = self._recorder, self._clock()
            if recorder is None:
                return None
            self._find_first_step(last=last)
            if self._losses:
                self._explain_losses(recorder, now, last=last)
            found = TimeReport(
                age=now - self._began,
                trains=self._first_step is not None,
                last=last,
                progress=self.progress,
                **self._seconds,
            )
            if self._first_step is None:
                found.start = max(0.0, found.age - sum(self._seconds.values()))
                return found
            found.start, found.compile = self._start, self._compiled
            found.recompile = max(0.0, self._seconds["compile"] - self._compiled)
            waited = self._waited() - self._before - self._explained
            found.waiting = max(0.0, waited)
            if last:
                found.end = self._since_last_call(recorder, now)
            return found

    def _find_first_step(self, *, last: bool = False) -> None:
        """Looks for the first call that was repeated: a step makes most calls once.

        Broadcasts of parameters are not repeated, so they belong to the start. Numbers
        in names count only if many calls have shown no repetition, because the names of
        a program may contain its steps. After a success, further calls do nothing.
        An open block becomes a mark only at its end, so the search waits for that.
        """
        recorder = self._recorder
        if self._first_step is not None or recorder is None:
            return
        if self._inside and not last:
            return
        events = [e for e in recorder.events() if e["entered"] >= self._began]
        first = _first_repeated(events)
        if first is None and (last or recorder.count >= RECORDER_CAPACITY):
            unnumbered = [{**e, "name": _NUMBER.sub("", e["name"])} for e in events]
            first = _first_repeated(unnumbered)
        if first is not None:
            self._begin_steps(events, first)

    def _begin_steps(self, events: _Events, first: float) -> None:
        """Divides the time until `first` into the start and earlier marks."""
        self._first_step = first
        early = dict.fromkeys(self._seconds, 0.0)
        explained = _waits(events, self._began, first)
        ends = [event["done"] for event in events]
        for mark in self._marks:
            early[mark.part] += max(0.0, min(mark.ended, first) - mark.began)
            if mark.ended > first:
                began = max(mark.began, first)
                inside = events[bisect(ends, began) : bisect(ends, mark.ended)]
                explained += _waits(inside, began, mark.ended)
        self._compiled = early.get("compile", 0.0)
        self._start = max(0.0, first - self._began - sum(early.values()))
        self._explained = explained

    def _explain_losses(
        self, recorder: _native.Recorder, now: float, *, last: bool
    ) -> None:
        """Moves the waits of calls that a loss has stopped from waiting to losses."""
        events = recorder.events()
        for loss in list(self._losses):
            began, ended = loss
            stopped = [e for e in events if e["entered"] < ended and e["done"] > began]
            pending = not any(e["done"] > ended for e in events)
            if pending and not last:
                continue  # the call that goes on after the repair has not ended yet
            self._losses.remove(loss)
            waited = _waits(stopped, self._first_step or now, now)
            self._seconds["losses"] += waited
            self._explained += waited

    def _since_last_call(self, recorder: _native.Recorder, now: float) -> float:
        events = recorder.events()
        done = max((e["done"] for e in events), default=now)
        marked = sum(
            max(0.0, mark.ended - max(mark.began, done)) for mark in self._marks
        )
        return max(0.0, now - done - marked)


def _first_repeated(events: _Events) -> float | None:
    """Returns when all ranks had entered the first call that was repeated later."""
    keys = [tuple(event[name] for name in _KEY) for event in events]
    counts = Counter(keys)
    for event, key in zip(events, keys, strict=True):
        own = event["name"].startswith(_CALLS_OF_RINGJAX)
        if counts[key] > 1 and not own and event["agreed"] is not None:
            return float(event["agreed"])
    return None


def _waits(events: _Events, since: float, until: float) -> float:
    """Returns the seconds between two moments in which at least one call waited."""
    seconds, counted = 0.0, since
    for event in events:  # the order is that of their ends
        agreed = event["done"] if event["agreed"] is None else event["agreed"]
        began, ended = max(event["entered"], counted), min(agreed, until)
        if ended > began:
            seconds, counted = seconds + ended - began, ended
    return seconds


spent = TimeSpent()  # the time of this process
