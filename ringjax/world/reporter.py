"""Reporter: prints a report about the job every few seconds, in jobs without ringrun.

Every rank samples the stack of its main thread. The heartbeat of the rank sends the
samples and the wait records of its calls to rank 0, where a thread combines and prints
them. In a job that ringrun started, telemetry_client.py sends the samples to ringrun,
which prints these reports.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from ringjax import _native
from ringjax.monitor import report, view
from ringjax.monitor.aggregator import Aggregator, Window
from ringjax.monitor.sample import Sample
from ringjax.monitor.stragglers import WaitRecord
from ringjax.world.epoch import Epoch
from ringjax.world.stack_probe import SAMPLE_INTERVAL, StackSampler
from ringjax.world.telemetry_client import TelemetrySource


class Reporter:
    """Samples this rank in a thread, which prints the job's reports on rank 0."""

    def __init__(
        self, source: TelemetrySource, interval: float, write: Callable[[str], None]
    ) -> None:
        self._source, self._interval, self._write = source, interval, write
        self._sampler = StackSampler()
        self._aggregator: Aggregator | None = None
        self._window: Window | None = None
        self._heartbeat: _native.Heartbeat | None = None
        self._epoch: Epoch | None = None
        self._seen_calls = 0
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-report", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Rank 0 also prints a summary. Further calls do nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL):
            self._sample()
        if self._aggregator is not None and self._is_first():
            self._collect()
            self._write(
                report.format_summary(self._aggregator, time.monotonic() - self._began)
            )

    def _is_first(self) -> bool:
        return self._epoch is not None and self._epoch.rank_info.rank == 0

    def _sample(self) -> None:
        self._sampler.sample()
        epoch = self._source.current_epoch
        heartbeat = None if epoch is None else epoch.heartbeat
        if epoch is None or heartbeat is None:
            return
        if heartbeat is not self._heartbeat:
            self._begin_epoch(epoch, heartbeat)
        if not self._is_first():
            heartbeat.say_where(self._sampler.shares)
            return
        assert self._aggregator is not None and self._window is not None
        self._collect()
        now = time.monotonic()
        if now - self._window.began >= self._interval:
            self._write(
                report.format_report(
                    view.make_view(self._aggregator, self._window, now)
                )
            )
            self._aggregator.restart_window(self._window, now)

    def _begin_epoch(self, epoch: Epoch, heartbeat: _native.Heartbeat) -> None:
        self._epoch, self._heartbeat = epoch, heartbeat
        first = self._is_first()
        heartbeat.share_waits(None if first else self._source.recorder)
        self._seen_calls = self._source.recorder.count
        if first and self._aggregator is None:
            self._aggregator = Aggregator()
            self._window = self._aggregator.open_window(time.monotonic())
        if self._aggregator is not None:
            workers = {self._worker(rank) for rank in range(epoch.rank_info.size)}
            for worker in self._aggregator.workers.keys() - workers:
                self._aggregator.remove_worker(worker)

    def _worker(self, rank: int) -> int:
        # In an elastic job, a new epoch may change ranks but never changes worker ids.
        members = [] if self._epoch is None else self._epoch.members
        worker = members[rank].worker if rank < len(members) else -1
        return worker if worker >= 0 else rank

    def _collect(self) -> None:
        """Adds the new samples of all ranks to the aggregator."""
        assert self._epoch is not None and self._heartbeat is not None
        recorder = self._source.recorder
        self._seen_calls, waits = _native.waits_since(recorder, self._seen_calls)
        waiting, moving = recorder.busy()
        own = self._sample_of(0, recorder.count, waits, self._sampler.shares)
        own.waiting, own.moving, own.tuned = waiting, moving, self._source.tuned
        self._add(own)
        reports = self._heartbeat.take_waits()
        for rank, (calls, waiting, moving, waits, location) in reports.items():
            if calls or location:
                received = self._sample_of(rank, calls, waits, location)
                received.waiting, received.moving = waiting, moving
                self._add(received)

    def _sample_of(
        self, rank: int, calls: int, waits: list[WaitRecord], location: str
    ) -> Sample:
        assert self._epoch is not None
        return Sample(
            rank=rank,
            size=self._epoch.rank_info.size,
            epoch=self._epoch.number,
            host=self._epoch.hostname_of(rank),
            calls=calls,
            waits=waits,
            place=location,
        )

    def _add(self, sample: Sample) -> None:
        assert self._aggregator is not None
        self._aggregator.add_sample(self._worker(sample.rank), sample, time.monotonic())


def write_to_stderr(text: str) -> None:
    """Writes a report by one call, so that lines of other ranks do not interleave."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
