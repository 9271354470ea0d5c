"""Everything that ringrun knows of its ranks while they run, and those who want it.

Ranks are asked to tell needs_samples only while somebody wants to know: a report, metrics,
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

SAMPLE_INTERVAL = 1.0  # seconds between two samples of a rank, in a job of some ranks
_MAX_SAMPLES_PER_SECOND = 128  # samples of all ranks together
_WINDOW = 5.0  # seconds, at least, that "now" means
_SEND_INTERVAL = 1.0  # seconds between two messages to those who look
_MAX_EVENTS = 12  # of the last ones, in such a message
_LATE_AFTER = (
    30.0  # seconds, from where on it is late_now that no rank has told anything
)
_MAX_COMMAND = 200  # characters

_P = ParamSpec("_P")
_Method = Callable[Concatenate["JobMonitor", _P], None]


def _never_raises(method: _Method[_P]) -> _Method[_P]:
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
    """One for a job; `open` it before the job starts, `close` it at the end.

    Attributes:
        broken: it has given up.
    """

    def __init__(
        self, agents: AgentPool, console: Console, spec: JobSpec, *, elastic: bool
    ) -> None:
        self._agents, self._console = agents, console
        self._about = {
            "pid": os.getpid(),
            "command": shlex.join(spec.command)[:_MAX_COMMAND],
            "elastic": elastic,
        }
        self._options = spec.monitor
        self.broken = False
        self._lock = threading.Lock()  # guards the aggregator and its windows
        self._aggregator = Aggregator()
        self._recent: list[Window] = []  # of two, the older one is looked through
        self._reported: Window | None = None
        self._ended: set[int] = set()
        self._interval = self._last_sent = self._step = 0.0
        self._start_time = time.monotonic()
        self._noted_late = False  # and that was said
        self._first_sample_time = 0.0  # when the first rank told needs_samples
        self._top_server: TopServer | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._file: PrometheusTextFile | None = None
        self._text = 0.0, ""
        agents.on_sample = self._receive_sample
        console.on_note = self._record_event

    def open(self) -> None:
        """Opens what is options.

        Raises:
            OSError: it is not possible.
        """
        options, note = self._options, self._console.note
        try:
            self._top_server = TopServer(self._agents.selector, self._update_interval)
        except OSError:
            self._top_server = None  # nowhere to be found: nobody will look
        try:
            if options.host or options.file:
                from ringjax.run.monitor.prometheus import (  # slow
                    PrometheusEndpoint,
                    PrometheusTextFile,
                )

                if options.host:
                    self._endpoint = PrometheusEndpoint(options, self._render_metrics)
                    note(f"metrics: {self._endpoint.url}")
                if options.file:
                    self._file = PrometheusTextFile(
                        options.file, self._render_metrics, note
                    )
        except BaseException:
            self.close()
            raise
        self._update_interval()

    @_never_raises
    def _update_interval(self) -> None:
        """Ranks tell as often as somebody wants to know, and they are not too many."""
        asked = self._options.needs_samples or bool(self._top_server)
        interval = (
            max(SAMPLE_INTERVAL, self._picture.size / _MAX_SAMPLES_PER_SECOND)
            if asked
            else 0.0
        )
        if interval == self._interval:
            return
        now = time.monotonic()
        with self._lock:
            if asked and not self._recent:
                self._recent = [self._picture.open(now), self._picture.open(now)]
                if self._options.report:
                    self._reported = self._picture.open(now)
            elif not asked:
                for window in self._recent:
                    self._aggregator.close_window(window)
                self._recent = []
        self._interval = interval
        self._agents.set_telemetry_interval(interval)

    # What happens.

    @_never_raises
    def _receive_sample(self, name: int, text: str) -> None:
        try:
            sample = parse_sample(text)
        except ValueError:
            return  # of a process of ours that has gone mad
        now = time.monotonic()
        self._first_sample_time = self._first_sample_time or now
        with self._lock:
            self._aggregator.add_sample(name, sample, now)
            if name in self._ended:  # its last words
                self._aggregator.remove_worker(name)
        self._step = sample.step or self._step

    @_never_raises
    def _record_event(self, text: str) -> None:
        with self._lock:
            self._aggregator.add_event(text, time.monotonic())

    @_never_raises
    def rank_ended(self, name: int) -> None:
        """A rank's process has rank_ended."""
        with self._lock:
            self._ended.add(name)
            self._aggregator.remove_worker(name)

    @_never_raises
    def members_changed(self, joined: int, lost: int) -> None:
        """Other workers are members than before: so many more, and so many less."""
        with self._lock:
            self._aggregator.joins += joined
            self._aggregator.losses += lost

    @_never_raises
    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._top_server is not None:
            self._top_server.close_silent(now)
        if not self._interval:
            return
        self._update_interval()
        with self._lock:
            if now - self._recent[1].began >= max(_WINDOW, 3 * self._interval):
                self._recent.reverse()
                self._picture.renew(self._recent[1], now)
        if self._reported and now - self._reported.began >= self._options.report:
            with self._lock:
                seen = self._view(self._reported, now)
                self._picture.renew(self._reported, now)
            if seen.rows or self._is_late(now):
                self._console.write_lines(report.block(seen))
        if self._top_server and now - self._last_sent >= _SEND_INTERVAL:
            self._last_sent = now
            message = json.dumps(self._message(now), separators=(",", ":"))
            self._top_server.send(message.encode() + b"\n")

    def _view(self, window: Window, now: float) -> view.View:
        return view.look(self._picture, window, now, self._interval)

    def _is_late(self, now: float) -> bool:
        """Whether to say, once, that nothing is heard of any rank."""
        late = not self._first_sample_time and now - self._start_time > _LATE_AFTER
        late_now, self._noted_late = (
            late and not self._noted_late,
            self._noted_late or late,
        )
        return late_now

    def _message(self, now: float) -> Mapping[str, Any]:
        with self._lock:
            picture = self._picture
            seen = self._view(self._recent[0], now)
            events = [
                [now - then, text] for then, text in picture.events[-_MAX_EVENTS:]
            ]
            changes = {"joins": picture.joins, "losses": picture.losses}
        about = {**self._about, **changes, "seconds": now - self._start_time}
        return {"job": about, "view": seen.message(), "events": events}

    def _render_metrics(self) -> str:
        """The metrics of now; from any thread. Not made anew for each who asks."""
        now = time.monotonic()
        with self._lock:
            then, text = self._text
            if now - then < SAMPLE_INTERVAL / 2 and text:
                return text
            window = self._recent[0] if self._recent else Window(0, {}, now)
            seen = self._view(window, now)
            families = metrics.of_job(self._picture, seen, package.version())
            text = metrics.text(families)
            self._text = now, text
            return text

    # The end.

    def give_up(self, error: Exception) -> None:
        """Nobody gets to know anything any more."""
        self.broken = True
        kind = type(error).__name__
        self._shut()
        self._agents.set_telemetry_interval(0.0)
        self._console.note(f"nothing more is told of the ranks: {kind}: {error}")

    def close(self) -> None:
        """Closes everything, and says how the job was if reports are options."""
        if self._options.report and self._reported and not self.broken:
            seconds = time.monotonic() - self._first_sample_time
            self._console.write_lines(
                report.summary(self._picture, seconds, self._step)
            )
        self._reported = None
        self._shut()

    def _shut(self) -> None:
        for one in (self._top_server, self._endpoint, self._file):
            if one is not None:
                one.close()
        self._top_server = self._endpoint = self._file = None
