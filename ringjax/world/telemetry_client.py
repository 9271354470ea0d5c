"""Telemetry client: sends samples of this rank to ringrun while somebody is watching.

A thread connects to the agent of ringrun on this host and waits until the agent
requests samples. While the agent requests samples, the thread samples the main thread's
stack every 50 ms and sends one `Sample` per interval. While nobody is watching, it only
sends a `TimeReport` of some hundred bytes now and then, and a last one at the end. The
training never depends on the connection: if the connection breaks, the thread ends and
the rank continues to train.

Protocol, one line per message, over an abstract unix socket of the agent:

    client to agent, once          {"id":3}            ringrun's number of this process
    agent to client, any time      1                   seconds per sample; 0 stops
    client to agent, per interval  {"rank":0,...}      see monitor/sample.py
    client to agent, now and then  {"time":{...}}      see monitor/time_report.py

The agent's end is run/hosts/telemetry_relay.py, which forwards the samples to ringrun.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from ringjax import _native
from ringjax.control.polling import wait_readable
from ringjax.control.unix_peer import peer_uid
from ringjax.links import fabric
from ringjax.monitor import sample, sockets
from ringjax.monitor.sample import Sample
from ringjax.monitor.stragglers import WaitRecord
from ringjax.world.communicator_ids import EAGER_LANE
from ringjax.world.epoch import Epoch
from ringjax.world.recorder import RECORDER_CAPACITY
from ringjax.world.stack_probe import SAMPLE_INTERVAL, StackSampler
from ringjax.world.time_spent import spent

_MAX_WAITS = 256  # the largest number of wait records in one sample
_MIN_INTERVAL, _MAX_INTERVAL = 0.05, 3600.0  # seconds between two samples
_IO_TIMEOUT = 5.0  # seconds to connect to the agent, or to send one sample
_STEP_ESTIMATE_INTERVAL = 5.0  # seconds; an estimate reads the whole recorder
# Seconds between two time reports. The interval grows with the age of the rank, because
# what a killed rank has not reported is then a small part of its time.
_MIN_REPORT_INTERVAL, _MAX_REPORT_INTERVAL = 2.0, 60.0
_REPORTS_PER_AGE = 20
_MAX_REPORTS_PER_SECOND = 128  # all ranks together send no more


class TelemetrySource(Protocol):
    """The attributes of `World` that samples and reports need."""

    recorder: _native.Recorder
    tuned: str

    @property
    def current_epoch(self) -> Epoch | None:
        """The epoch in force, or None while this rank is in no epoch."""


class TelemetryClient:
    """Sends samples of this rank to the ringrun agent of its host, on a daemon thread.

    `agent_socket` is the name of the agent's abstract unix socket, without the NUL.
    `client_id` is the id by which ringrun identifies this process: the worker id in an
    elastic job, otherwise the rank.
    """

    def __init__(
        self, source: TelemetrySource, agent_socket: str, client_id: int
    ) -> None:
        self._source = source
        self._agent_socket, self._client_id = agent_socket, client_id
        self._sampler = StackSampler()
        self._seen_calls = 0
        self._interval = 0.0  # seconds between two samples; 0 if nobody is watching
        self._due = 0.0  # wall-clock time of the next sample; 0 if not decided yet
        self._step_seconds = self._step_estimated_at = 0.0
        self._report_due = _next_multiple(_MIN_REPORT_INTERVAL)
        self._received = b""
        self._epoch: Epoch | None = None
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(
            target=self._run, name="ringjax-telemetry", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Sends a last time report, and a sample if somebody watches; ends the thread.

        Waits at most one second. Further calls do nothing.
        """
        if self._closing:
            return
        self._closing = True
        # Closing only the reading side wakes the thread, which can then send a last
        # sample.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(1.0)

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the socket. The child has no such thread."""
        self._socket.close()

    def _run(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            sockets.connect_within(self._socket, f"\0{self._agent_socket}", _IO_TIMEOUT)
            # Any local user may bind an abstract name, so trust only an agent of this
            # process's own user.
            if peer_uid(self._socket) != os.geteuid():
                return
            self._socket.sendall(f'{{"id":{self._client_id}}}\n'.encode())
            # `close` cannot shut down a socket that is not connected yet (ENOTCONN).
            # `close` sets `_closing` first, so one of the two threads shuts the socket
            # down.
            if self._closing:
                self._socket.shutdown(socket.SHUT_RD)
            self._serve()

    def _serve(self) -> None:
        while self._wait_until_due():
            if self._interval:
                self._sample_stack()
            if time.monotonic() >= self._report_due:
                self._send_report()
        if self._interval:
            self._send_sample()
        self._send_report(last=True)

    def _sample_stack(self) -> None:
        """Samples the stack once, and sends a sample to ringrun if one is due."""
        self._sampler.sample()
        now = time.time()
        if now < self._due:
            return
        if self._due:
            self._send_sample()
            self._send_report()
        # The next multiple of the interval on the wall clock. All ranks send samples at
        # the same times, so their samples cover the same calls, and ringrun can compare
        # how long each rank waited in one call.
        self._due = (now // self._interval + 1) * self._interval

    def _send_report(self, *, last: bool = False) -> None:
        report, epoch = spent.report(last=last), self._source.current_epoch
        age = 0.0 if report is None else report.age
        ranks = 1 if epoch is None else epoch.rank_info.size
        rare = max(_MIN_REPORT_INTERVAL, ranks / _MAX_REPORTS_PER_SECOND)
        interval = max(rare, min(age / _REPORTS_PER_AGE, _MAX_REPORT_INTERVAL))
        self._report_due = _next_multiple(interval)
        if report is not None:
            self._socket.sendall(report.text().encode() + b"\n")

    def _wait_until_due(self) -> bool:
        """Waits until a stack sample or a report is due. Receives new intervals.

        Returns False when the connection has ended.
        """
        while True:
            timeout = max(0.0, self._report_due - time.monotonic())
            if self._interval:
                left = max(0.0, self._due - time.time())
                timeout = min(timeout, SAMPLE_INTERVAL, left)
            if not wait_readable(self._socket.fileno(), timeout):
                return True
            data = self._socket.recv(4096)
            if not data:
                return False
            *lines, self._received = (self._received + data)[-4096:].split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._set_interval(float(line))

    def _set_interval(self, seconds: float) -> None:
        if not self._interval:
            # Nobody was watching until now. Start as at the beginning of a job: wait
            # for the next multiple of the interval, and skip the calls made while
            # nobody was watching.
            self._due, self._epoch = 0.0, None
        self._interval = 0.0
        if seconds > 0:
            self._interval = min(max(seconds, _MIN_INTERVAL), _MAX_INTERVAL)

    def _send_sample(self) -> None:
        try:
            taken = self._take_sample()
        except RuntimeError:  # the epoch ended while its counters were read
            return
        if taken is not None:
            self._socket.sendall(taken.text().encode() + b"\n")

    def _take_sample(self) -> Sample | None:
        epoch, recorder = self._source.current_epoch, self._source.recorder
        if epoch is None:
            return None
        if epoch is not self._epoch:
            # Sequence numbers restart in every epoch. Skip the waits of the previous
            # epoch, because ringrun would compare them with calls of other ranks in
            # this epoch.
            self._epoch, self._seen_calls = epoch, recorder.count
        before = self._seen_calls
        self._seen_calls, waits = _native.waits_since(recorder, before)
        sent = thin_waits(waits)
        # The recorder overwrites its oldest calls. Compute the share of new calls that
        # is left.
        recorded = min(1.0, RECORDER_CAPACITY / max(1, self._seen_calls - before))
        rank_info = epoch.rank_info
        if rank_info.rank == 0:
            self._update_step_estimate()
        waiting, moving = recorder.busy()
        totals = recorder.totals()
        return Sample(
            rank=rank_info.rank,
            size=rank_info.size,
            epoch=epoch.number,
            host=epoch.hostname_of(rank_info.rank) or socket.gethostname(),
            calls=recorder.count,
            waiting=waiting,
            moving=moving,
            exposed=_exposed_seconds(epoch),
            waits=sent,
            part=recorded * len(sent) / max(1, len(waits)),
            place=self._sampler.shares,
            tuned=self._source.tuned,
            fabric=fabric.name_of(epoch.config),
            memory=_resident_bytes(),
            step=self._step_seconds if rank_info.rank == 0 else 0.0,
            sums=sample.sums(totals),
            faults=sum(one["faults"] for one in totals),
        )

    def _update_step_estimate(self) -> None:
        age = time.monotonic() - self._step_estimated_at
        if not self._step_seconds or age > _STEP_ESTIMATE_INTERVAL:
            self._step_seconds = estimate_step_seconds(self._source.recorder.events())
            self._step_estimated_at = time.monotonic()


def _next_multiple(seconds: float) -> float:
    """Returns when the wall clock is next a multiple of `seconds`, in monotonic time.

    All ranks report at the same times, so their reports are about the same steps.
    """
    return time.monotonic() + seconds - time.time() % seconds


def thin_waits(
    waits: list[WaitRecord], max_waits: int = _MAX_WAITS
) -> list[WaitRecord]:
    """Keeps at most `max_waits` wait records, of nearly the same calls on all ranks.

    ringrun finds stragglers by comparing one call across all ranks. Ranks may have
    different numbers of records, so "every n-th record" would keep different calls on
    each rank. This function keeps the calls whose sequence number is a multiple of 1,
    2, 4, 8, ...: if two ranks end at different powers of two, the rank with the larger
    power keeps only calls that the other rank keeps, too. A record is ``(lane,
    sequence number, microseconds waited)``.

    Examples:
        >>> thin_waits([(0, number, 0) for number in range(10)], 3)
        [(0, 0, 0), (0, 4, 0), (0, 8, 0)]
    """
    divisor = 1
    while len(waits) > max_waits:
        divisor *= 2
        waits = [each for each in waits if each[1] % divisor == 0]
        if divisor > 1 << 20:  # too many records share one sequence number
            return waits[:max_waits]
    return waits


def estimate_step_seconds(events: list[dict[str, Any]]) -> float:
    """Estimates the seconds per training step from `Recorder.events`.

    A call is identified by its lane, process set, operation, name and size. A training
    step makes most of its calls exactly once, so the mean interval between repeats of a
    call is the duration of a step. Returns the median of the mean intervals, each
    weighted by the number of its calls; 0.0 if no call has been repeated.

    Examples:
        >>> call = {"lane": "named", "set": 0, "op": "allreduce", "bytes": 4}
        >>> events = [call | {"name": "x", "entered": t} for t in (1.0, 3.0, 5.0)]
        >>> estimate_step_seconds(events)
        2.0
    """
    times: dict[tuple[object, ...], list[float]] = {}
    for event in events:
        key = tuple(event[name] for name in ("lane", "set", "op", "name", "bytes"))
        times.setdefault(key, []).append(event["entered"])
    intervals = sorted(
        ((max(entered) - min(entered)) / (len(entered) - 1), len(entered))
        for entered in times.values()
        if len(entered) > 1
    )
    # Each repetition has one vote. A checkpoint or an evaluation is repeated about once
    # in a hundred steps, so it has fewer votes than the gradients.
    votes = [seconds for seconds, count in intervals for _ in range(count)]
    return votes[len(votes) // 2] if votes else 0.0


def _exposed_seconds(epoch: Epoch) -> float:
    """Returns how long compiled programs waited for overlapped calls in this epoch."""
    exposed = 0.0
    # Iterate over a copy, because the main thread may add a process set at the same
    # time.
    for number, communicator in list(epoch.communicators.items()):
        if number < EAGER_LANE:
            overlap: Mapping[str, float] = communicator.stats().get("overlap", {})
            exposed += overlap.get("exposed_seconds", 0.0)
    return exposed


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
