"""Everything that ringrun knows of its ranks while they run, and those who want it.

Ranks are asked to tell something only while somebody wants to know: a report, metrics,
or `ringjax top`. Nothing in here may end the job: what fails is said once, and is over.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from ringjax.monitor import metrics, report, view
from ringjax.monitor.aggregator import Aggregator, Window
from ringjax.monitor.sample import parse_sample
from ringjax.run.console import Console
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.monitor.top_server import TopServer
from ringjax.settings import version as package

if TYPE_CHECKING:
    from ringjax.run.monitor.prometheus import PrometheusEndpoint, PrometheusTextFile

EVERY = 1.0  # seconds between two samples of a rank, in a job of some ranks
_MOST_A_SECOND = 128  # samples of all ranks together
_RECENT = 5.0  # seconds, at least, that "now" means
_SHOWN = 1.0  # seconds between two messages to those who look
_EVENTS = 12  # of the last ones, in such a message
_LATE = 30.0  # seconds, from where on it is odd that no rank has told anything
_COMMAND = 200  # characters

_P = ParamSpec("_P")
_Method = Callable[Concatenate["JobMonitor", _P], None]


def _harmless(method: _Method[_P]) -> _Method[_P]:
    """Whatever is wrong in it, ringrun's loop goes on."""

    @functools.wraps(method)
    def guarded(self: JobMonitor, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return guarded


class JobMonitor:
    """One for a job; `begin` it before the job starts, `close` it at the end.

    Attributes:
        broken: it has given up.
    """

    def __init__(
        self, fleet: AgentPool, console: Console, spec: JobSpec, *, elastic: bool
    ) -> None:
        self._fleet, self._console = fleet, console
        self._about = {
            "pid": os.getpid(),
            "command": shlex.join(spec.command)[:_COMMAND],
            "elastic": elastic,
        }
        self.wanted = spec.wanted
        self.broken = False
        self._lock = threading.Lock()  # guards the aggregator and its windows
        self._aggregator = Aggregator()
        self._recent: list[Window] = []  # of two, the older one is looked through
        self._reported: Window | None = None
        self._ended: set[int] = set()
        self._every = self._shown = self._step = 0.0
        self._opened = time.monotonic()
        self._odd = False  # and that was said
        self._began = 0.0  # when the first rank told something
        self._viewers: TopServer | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._file: PrometheusTextFile | None = None
        self._text = 0.0, ""
        fleet.on_told = self._told
        console.on_note = self._noted

    def begin(self) -> None:
        """Opens what is wanted.

        Raises:
            OSError: it is not possible.
        """
        wanted, note = self.wanted, self._console.note
        try:
            self._viewers = TopServer(self._fleet.selector, self._adjust)
        except OSError:
            self._viewers = None  # nowhere to be found: nobody will look
        try:
            if wanted.host or wanted.file:
                from ringjax.run.monitor.prometheus import (  # slow
                    PrometheusEndpoint,
                    PrometheusTextFile,
                )

                if wanted.host:
                    self._endpoint = PrometheusEndpoint(wanted, self._rendered)
                    note(f"metrics: {self._endpoint.url}")
                if wanted.file:
                    self._file = PrometheusTextFile(wanted.file, self._rendered, note)
        except BaseException:
            self.close()
            raise
        self._adjust()

    @_harmless
    def _adjust(self) -> None:
        """Ranks tell as often as somebody wants to know, and they are not too many."""
        asked = self.wanted.something or bool(self._viewers)
        every = max(EVERY, self._aggregator.size / _MOST_A_SECOND) if asked else 0.0
        if every == self._every:
            return
        now = time.monotonic()
        with self._lock:
            if asked and not self._recent:
                self._recent = [
                    self._aggregator.open_window(now),
                    self._aggregator.open_window(now),
                ]
                if self.wanted.report:
                    self._reported = self._aggregator.open_window(now)
            elif not asked:
                for window in self._recent:
                    self._aggregator.close_window(window)
                self._recent = []
        self._every = every
        self._fleet.monitor(every)

    # What happens.

    @_harmless
    def _told(self, name: int, text: str) -> None:
        try:
            sample = parse_sample(text)
        except ValueError:
            return  # of a process of ours that has gone mad
        now = time.monotonic()
        self._began = self._began or now
        with self._lock:
            self._aggregator.add_sample(name, sample, now)
            if name in self._ended:  # its last words
                self._aggregator.remove_worker(name)
        self._step = sample.step or self._step

    @_harmless
    def _noted(self, text: str) -> None:
        with self._lock:
            self._aggregator.add_event(text, time.monotonic())

    @_harmless
    def ended(self, name: int) -> None:
        """A rank's process has ended."""
        with self._lock:
            self._ended.add(name)
            self._aggregator.remove_worker(name)

    @_harmless
    def changed(self, joined: int, lost: int) -> None:
        """Other workers are members than before: so many more, and so many less."""
        with self._lock:
            self._aggregator.joins += joined
            self._aggregator.losses += lost

    @_harmless
    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._viewers is not None:
            self._viewers.sweep(now)
        if not self._every:
            return
        self._adjust()
        with self._lock:
            if now - self._recent[1].began >= max(_RECENT, 3 * self._every):
                self._recent.reverse()
                self._aggregator.restart_window(self._recent[1], now)
        if self._reported and now - self._reported.began >= self.wanted.report:
            with self._lock:
                seen = self._look(self._reported, now)
                self._aggregator.restart_window(self._reported, now)
            if seen.rows or self._is_late(now):
                self._console.say(report.format_report(seen))
        if self._viewers and now - self._shown >= _SHOWN:
            self._shown = now
            message = json.dumps(self._message(now), separators=(",", ":"))
            self._viewers.send(message.encode() + b"\n")

    def _look(self, window: Window, now: float) -> view.View:
        return view.make_view(self._aggregator, window, now, self._every)

    def _is_late(self, now: float) -> bool:
        """Whether to say, once, that nothing is heard of any rank."""
        late = not self._began and now - self._opened > _LATE
        odd, self._odd = late and not self._odd, self._odd or late
        return odd

    def _message(self, now: float) -> Mapping[str, Any]:
        with self._lock:
            aggregator = self._aggregator
            seen = self._look(self._recent[0], now)
            events = [[now - then, text] for then, text in aggregator.events[-_EVENTS:]]
            changes = {"joins": aggregator.joins, "losses": aggregator.losses}
        about = {**self._about, **changes, "seconds": now - self._opened}
        return {"job": about, "view": seen.message(), "events": events}

    def _rendered(self) -> str:
        """The metrics of now; from any thread. Not made anew for each who asks."""
        now = time.monotonic()
        with self._lock:
            then, text = self._text
            if now - then < EVERY / 2 and text:
                return text
            window = self._recent[0] if self._recent else Window(0, {}, now)
            seen = self._look(window, now)
            families = metrics.job_metrics(self._aggregator, seen, package.version())
            text = metrics.format_metrics(families)
            self._text = now, text
            return text

    # The end.

    def give_up(self, error: Exception) -> None:
        """Nobody gets to know anything any more."""
        self.broken = True
        kind = type(error).__name__
        self._shut()
        self._fleet.monitor(0.0)
        self._console.note(f"nothing more is told of the ranks: {kind}: {error}")

    def close(self) -> None:
        """Closes everything, and says how the job was if reports are wanted."""
        if self.wanted.report and self._reported and not self.broken:
            seconds = time.monotonic() - self._began
            self._console.say(
                report.format_summary(self._aggregator, seconds, self._step)
            )
        self._reported = None
        self._shut()

    def _shut(self) -> None:
        for one in (self._viewers, self._endpoint, self._file):
            if one is not None:
                one.close()
        self._viewers = self._endpoint = self._file = None
