"""What the job does, every few seconds, where no ringrun gathers it: in the first rank.

Every rank samples where its program is, and its heartbeat takes that and its waits to
the first rank, whose thread here puts them together and prints. Under ringrun ranks
tell it to ringrun instead (telling.py), which prints the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ringjax import _native
from ringjax.monitor import report, view
from ringjax.monitor.aggregator import Aggregator, Window
from ringjax.monitor.sample import Sample
from ringjax.monitor.stragglers import WaitRecord
from ringjax.world.epoch import Epoch
from ringjax.world.places import LOOK, Places


class Home(Protocol):
    """What is needed of the world."""

    recorder: _native.Recorder
    tuned: str

    @property
    def present(self) -> Epoch | None:
        """The one in force; None: there is none, or none yet."""


def host(epoch: Epoch, rank: int) -> str:
    """The name of a rank's host; empty: nobody has told."""
    members = epoch.members
    return str(members[rank].hello.get("hostname") or "") if rank < len(members) else ""


class Reporter:
    """Samples on every rank; gathers and prints on the first.

    Args:
        seconds: between two blocks.
        write: takes the text of a block.
    """

    def __init__(
        self, home: Home, seconds: float, write: Callable[[str], None]
    ) -> None:
        self._home, self._seconds, self._write = home, seconds, write
        self._places = Places()
        self._aggregator: Aggregator | None = None
        self._window: Window | None = None
        self._heartbeat: _native.Heartbeat | None = None
        self._epoch: Epoch | None = None
        self._seen = 0
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-report", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the first rank prints its summary. May be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(LOOK):
            self._look()
        if self._aggregator is not None and self._is_first():
            self._gather()
            self._write(
                report.format_summary(self._aggregator, time.monotonic() - self._began)
            )

    def _is_first(self) -> bool:
        return self._epoch is not None and self._epoch.standing.rank == 0

    def _look(self) -> None:
        self._places.look()
        epoch = self._home.present
        heartbeat = None if epoch is None else epoch.heartbeat
        if epoch is None or heartbeat is None:
            return
        if heartbeat is not self._heartbeat:
            self._follow(epoch, heartbeat)
        if not self._is_first():
            heartbeat.say_where(self._places.shares)
            return
        assert self._aggregator is not None and self._window is not None
        self._gather()
        now = time.monotonic()
        if now - self._window.began >= self._seconds:
            self._write(
                report.format_report(
                    view.make_view(self._aggregator, self._window, now)
                )
            )
            self._aggregator.restart_window(self._window, now)

    def _follow(self, epoch: Epoch, heartbeat: _native.Heartbeat) -> None:
        """A new epoch: whoever was not the first before begins an aggregator."""
        self._epoch, self._heartbeat = epoch, heartbeat
        first = self._is_first()
        heartbeat.share_waits(None if first else self._home.recorder)
        self._seen = self._home.recorder.count
        if first and self._aggregator is None:
            self._aggregator = Aggregator()
            self._window = self._aggregator.open_window(time.monotonic())
        if self._aggregator is not None:
            present = {self._worker(rank) for rank in range(epoch.standing.size)}
            for worker in self._aggregator.workers.keys() - present:
                self._aggregator.remove_worker(worker)

    def _worker(self, rank: int) -> int:
        """Who that rank is: a number that no other process has, in all epochs."""
        members = [] if self._epoch is None else self._epoch.members
        worker = members[rank].worker if rank < len(members) else -1
        return worker if worker >= 0 else rank

    def _gather(self) -> None:
        assert self._epoch is not None and self._heartbeat is not None
        recorder = self._home.recorder
        self._seen, mine = _native.waits_since(recorder, self._seen)
        told = self._heartbeat.take_waits()
        self._hear(0, recorder.count, *recorder.busy(), mine, self._places.shares)
        for rank, one in told.items():
            if one[0] or one[4]:
                self._hear(rank, *one)

    def _hear(
        self,
        rank: int,
        calls: int,
        waiting: float,
        moving: float,
        waits: list[WaitRecord],
        place: str,
    ) -> None:
        assert self._aggregator is not None and self._epoch is not None
        sample = Sample(
            rank,
            self._epoch.standing.size,
            self._epoch.number,
            host(self._epoch, rank),
            calls,
            waiting,
            moving,
            waits=waits,
            place=place,
            tuned="" if rank else self._home.tuned,
        )
        self._aggregator.add_sample(self._worker(rank), sample, time.monotonic())


def to_standard_error(text: str) -> None:
    """Writes a block at once, so that lines of other ranks do not come between."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
