"""Monitors a job in ringrun: receives samples of ranks, makes reports and metrics.

After an error the monitor prints one line and stops, while the job continues.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from ringjax.monitor import metrics, report, view
from ringjax.monitor.aggregator import Aggregator, Window
from ringjax.monitor.job_time import JobTime, format_goodput
from ringjax.monitor.sample import parse_sample
from ringjax.monitor.time_report import is_time_report, parse_time_report
from ringjax.monitor.trainjob_status import TrainJobStatus, runs_in_trainjob
from ringjax.run.console import Console
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.monitor.options import monitor_options
from ringjax.run.monitor.top_server import TopServer
from ringjax.settings import version as package

if TYPE_CHECKING:
    from ringjax.run.monitor.prometheus import PrometheusEndpoint, PrometheusTextFile

SAMPLE_INTERVAL = 1.0  # seconds between two samples of a rank in a small job
_MAX_SAMPLES_PER_SECOND = 128  # most samples per second, of all ranks together
_WINDOW = 5.0  # current values cover at least these seconds
_SEND_INTERVAL = 1.0  # seconds between two messages to `ringjax top`
_MAX_EVENTS = 12  # most events in a message to `ringjax top`
_LATE_AFTER = 30.0  # seconds until a report says that no sample has arrived
_MAX_COMMAND = 200  # most characters of the job's command in a message

_P = ParamSpec("_P")
_Method = Callable[Concatenate["JobMonitor", _P], None]


def _never_raises(method: _Method[_P]) -> _Method[_P]:
    """Makes an error in `method` stop the monitor, and not the loop of ringrun."""

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
    """The monitor of a job. `broken` is True after an error has stopped the monitor.

    The job calls `open` before it starts ranks, and `close` at its end. From then on
    `goodput` says where the job's time has gone; it is "" if no rank has trained.
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
        self._options = monitor_options(spec.config)
        self.broken, self.goodput = False, ""
        self._lock = threading.Lock()  # guards the aggregator, its windows, and times
        self._aggregator = Aggregator()
        # Two windows that restart alternately. The first window is the older one. It
        # covers at least `_WINDOW` seconds and supplies the current values.
        self._recent: list[Window] = []
        self._reported: Window | None = None  # the window since the last report
        self._ended: set[int] = set()
        self._interval = self._last_sent = self._step = 0.0
        self._start_time = time.monotonic()
        self._time = JobTime(1, self._start_time)
        self._noted_late = False
        self._first_sample_time = 0.0
        self._top_server: TopServer | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._file: PrometheusTextFile | None = None
        self._text = 0.0, ""  # the time and the text of the last metrics
        self._env = spec.env
        self._trainjob: TrainJobStatus | None = None
        agents.on_sample = self._receive_sample
        console.on_note = self._record_event

    def open(self) -> None:
        """Opens the socket for `ringjax top`, and serves metrics if configured.

        Raises OSError if the metrics cannot be served or written.
        """
        options, note = self._options, self._console.note
        try:
            self._top_server = TopServer(self._agents.selector, self._update_interval)
        except OSError:
            # Without a socket, `ringjax top` does not find this job.
            self._top_server = None
        if runs_in_trainjob(self._env):
            self._trainjob = TrainJobStatus(self._env, note)
        try:
            if options.host or options.file:
                # http.server is imported only here, because its import takes long.
                from ringjax.run.monitor.prometheus import (
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
        """Sets the interval of samples: 0 if nobody reads them, longer in big jobs."""
        asked = self._options.needs_samples or bool(self._top_server)
        spread = self._aggregator.size / _MAX_SAMPLES_PER_SECOND
        interval = max(SAMPLE_INTERVAL, spread) if asked else 0.0
        if interval == self._interval:
            return
        now = time.monotonic()
        with self._lock:
            if asked and not self._recent:
                self._recent = [
                    self._aggregator.open_window(now),
                    self._aggregator.open_window(now),
                ]
                if self._options.report:
                    self._reported = self._aggregator.open_window(now)
            elif not asked:
                for window in self._recent:
                    self._aggregator.close_window(window)
                self._recent = []
        self._interval = interval
        self._agents.set_telemetry_interval(interval)

    # -- events ------------------------------------------------------------------------

    @_never_raises
    def _receive_sample(self, number: int, text: str) -> None:
        if is_time_report(text.encode()):
            self._receive_report(number, text)
            return
        try:
            sample = parse_sample(text)
        except ValueError:
            return  # any process of this user can send bad lines, see TelemetryRelay
        now = time.monotonic()
        self._first_sample_time = self._first_sample_time or now
        with self._lock:
            self._aggregator.add_sample(number, sample, now)
            if number in self._ended:  # this sample has arrived after the exit
                self._aggregator.remove_worker(number)
        self._step = sample.step or self._step

    def _receive_report(self, number: int, text: str) -> None:
        try:
            time_report, now = parse_time_report(text), time.monotonic()
        except ValueError:
            return  # as in `_receive_sample`
        with self._lock:
            self._time.add_report(number, time_report, now)
        if self._trainjob is not None and time_report.progress is not None:
            self._trainjob.update(time_report.progress, now)

    @_never_raises
    def _record_event(self, text: str) -> None:
        with self._lock:
            self._aggregator.add_event(text, time.monotonic())

    @_never_raises
    def expect(self, ranks: int) -> None:
        """Sets the number of ranks that the user wants, before any rank starts."""
        with self._lock:
            self._time = JobTime(ranks, self._start_time)

    @_never_raises
    def ranks_started(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._time.add_process(number, time.monotonic())

    @_never_raises
    def rank_ended(self, number: int, how: str) -> None:
        """Records the end of a process; see `JobTime.end_process`."""
        with self._lock:
            self._ended.add(number)
            self._aggregator.remove_worker(number)
            self._time.end_process(number, time.monotonic(), how=how)

    @_never_raises
    def members_changed(self, members: Sequence[int], joined: int, lost: int) -> None:
        """Records a new epoch: its members, how many joined, how many were lost."""
        with self._lock:
            self._aggregator.joins += joined
            self._aggregator.losses += lost
            self._time.change_members(members, time.monotonic())

    @_never_raises
    def set_spares(self, spares: list[tuple[int, str, bool]]) -> None:
        """Replaces the list of spares, see `Aggregator.spares`."""
        with self._lock:
            self._aggregator.spares = spares

    @_never_raises
    def tick(self, now: float) -> None:
        """Prints a report and sends a message to viewers when these are due."""
        if self._top_server is not None:
            self._top_server.close_silent(now)
        if not self._interval:
            return
        self._update_interval()
        with self._lock:
            if now - self._recent[1].began >= max(_WINDOW, 3 * self._interval):
                self._recent.reverse()
                self._aggregator.restart_window(self._recent[1], now)
        if self._reported and now - self._reported.began >= self._options.report:
            with self._lock:
                seen = self._view(self._reported, now)
                self._aggregator.restart_window(self._reported, now)
            if seen.rows or self._is_late(now):
                self._console.write_lines(report.format_report(seen))
        if self._top_server and now - self._last_sent >= _SEND_INTERVAL:
            self._last_sent = now
            message = json.dumps(self._message(now), separators=(",", ":"))
            self._top_server.send(message.encode() + b"\n")

    def _view(self, window: Window, now: float) -> view.View:
        return view.make_view(self._aggregator, window, now, self._interval)

    def _is_late(self, now: float) -> bool:
        """Returns True once if no sample has arrived for a long time."""
        late = not self._first_sample_time and now - self._start_time > _LATE_AFTER
        first = late and not self._noted_late
        self._noted_late = self._noted_late or late
        return first

    def _message(self, now: float) -> dict[str, object]:
        """Returns the next message to `ringjax top`; see `top.job_connection`."""
        with self._lock:
            aggregator = self._aggregator
            seen = self._view(self._recent[0], now)
            events = [
                [now - then, text] for then, text in aggregator.events[-_MAX_EVENTS:]
            ]
            changes = {"joins": aggregator.joins, "losses": aggregator.losses}
            spares = {} if aggregator.spares is None else {"spares": aggregator.spares}
            shares = self._time.shares(now)
        about = {**self._about, **changes, **spares, "seconds": now - self._start_time}
        message = {"job": about, "view": seen.message(), "events": events}
        return {**message, "time": shares}

    def _render_metrics(self) -> str:
        """Returns the metrics as text. Any thread may call this method.

        Reuses the text for half an interval, because many clients may request metrics.
        """
        now = time.monotonic()
        with self._lock:
            then, text = self._text
            if now - then < SAMPLE_INTERVAL / 2 and text:
                return text
            window = self._recent[0] if self._recent else Window(0, {}, now)
            seen = self._view(window, now)
            families = metrics.job_metrics(self._aggregator, seen, package.version())
            families += metrics.time_metrics(self._time.shares(now))
            text = metrics.format_metrics(families)
            self._text = now, text
            return text

    # -- the end -----------------------------------------------------------------------

    def give_up(self, error: Exception) -> None:
        self.broken = True
        kind = type(error).__name__
        self._close_servers()
        self._agents.set_telemetry_interval(0.0)
        self._console.note(f"nothing more is told of the ranks: {kind}: {error}")

    def close(self) -> None:
        """Closes all servers, and prints a summary if reports are configured."""
        self._sum_up(time.monotonic())
        if self._options.report and self._reported and not self.broken:
            seconds = time.monotonic() - self._first_sample_time
            summary = report.format_summary(self._aggregator, seconds, self._step)
            self._console.write_lines(summary)
        self._reported = None
        self._close_servers()

    @_never_raises
    def _sum_up(self, now: float) -> None:
        with self._lock:
            if shares := self._time.shares(now):
                self.goodput = format_goodput(shares, self._time.seconds)

    def _close_servers(self) -> None:
        for server in (self._top_server, self._endpoint, self._file, self._trainjob):
            if server is not None:
                server.close()
        self._top_server = self._endpoint = self._file = self._trainjob = None
