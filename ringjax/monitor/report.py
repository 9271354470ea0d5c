"""What the job does, every few seconds: a short block of text from its first rank.

Every rank samples where its program is, and its heartbeat takes that and its waits to
the first rank, whose thread here adds them up (`stragglers`) and prints.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringjax import _native
from ringjax.world.stragglers import Stragglers
from ringjax.world.whereabouts import doing

_SAMPLE = 0.05  # seconds between two looks at the program
_KEPT = 200  # looks


class Home(Protocol):
    """What the reporter needs of its world."""

    recorder: _native.Recorder

    def beats(self) -> tuple[_native.Heartbeat | None, int, Sequence[str]]:
        """The heartbeat of now, this rank, and the names of the hosts by rank."""


@dataclass
class Share:
    """What one rank has told in all: calls, seconds of waiting and of moving."""

    calls: int = 0
    waiting: float = 0.0
    moving: float = 0.0

    def since(self, before: Share) -> Share:
        """Of the time between the two."""
        return Share(
            self.calls - before.calls,
            self.waiting - before.waiting,
            self.moving - before.moving,
        )


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
        self._places: Counter[str] = Counter()
        self._where: dict[int, str] = {}
        self._shares: dict[int, Share] = {}
        self._before: dict[int, Share] = {}
        self._all: Stragglers | None = None
        self._seen = 0
        self._heartbeat: _native.Heartbeat | None = None
        self._began = self._first = time.monotonic()
        self._total = Share()
        self._lost: Counter[int] = Counter()
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
        while not self._stop.wait(_SAMPLE):
            self._look()
        if self._all is not None:
            self._gather()
            self._write(self._summary())

    def _look(self) -> None:
        heartbeat, rank, hosts = self._home.beats()
        if heartbeat is not None and heartbeat is not self._heartbeat:
            self._follow(heartbeat, rank, len(hosts))
        self._places[doing()] += 1
        if sum(self._places.values()) >= _KEPT:
            self._places = Counter(
                {k: n // 2 for k, n in self._places.items() if n > 1}
            )
        place = self._places.most_common(1)[0][0]
        self._where[rank] = place
        if heartbeat is None:
            return
        if rank > 0:
            heartbeat.say_where(place)
            return
        self._gather()
        elapsed = time.monotonic() - self._began
        if elapsed >= self._seconds:
            self._write(self._block(elapsed, hosts))
            self._begin_anew()

    def _follow(self, heartbeat: _native.Heartbeat, rank: int, size: int) -> None:
        """A new epoch: numbers of calls begin anew, and ranks are other ones."""
        self._heartbeat = heartbeat
        heartbeat.share_waits(self._home.recorder if rank > 0 else None)
        self._all = Stragglers(size) if rank == 0 else None
        self._seen = self._home.recorder.count
        self._where.clear()
        self._shares.clear()
        self._begin_anew()

    def _gather(self) -> None:
        assert self._all is not None and self._heartbeat is not None
        recorder = self._home.recorder
        self._seen, mine = _native.waits_since(recorder, self._seen)
        self._all.hear(0, mine)
        self._shares[0] = Share(recorder.count, *recorder.busy())
        for rank, told in self._heartbeat.take_waits().items():
            calls, waiting, moving, waits, place = told
            if calls:
                self._shares[rank] = Share(calls, waiting, moving)
            if place:
                self._where[rank] = place
            self._all.hear(rank, waits)

    def _begin_anew(self) -> None:
        self._began = time.monotonic()
        self._before = dict(self._shares)
        if self._all is not None:
            for rank, late in enumerate(self._all.late):
                self._lost[rank] += round(late.lost * 1e6)
            self._all.begin_anew()

    def _block(self, elapsed: float, hosts: Sequence[str]) -> str:
        assert self._all is not None
        shares = {
            rank: share.since(self._before.get(rank, Share()))
            for rank, share in sorted(self._shares.items())
        }
        culprit = self._all.culprit(elapsed)
        calls = max((share.calls for share in shares.values()), default=0)
        lines = [
            f"ringjax report: {calls / elapsed:.3g} calls/s, in {elapsed:.0f} s",
            f"{'rank':>4}  {'host':12} {'waits':>6} {'moves':>6} {'last in':>8} "
            f"{'late by':>9}  at",
        ]
        for rank, share in shares.items():
            late = self._all.late[rank]
            times = late.times / self._all.calls if self._all.calls else 0.0
            lines.append(
                f"{rank:4}  {hosts[rank][:12]:12} {share.waiting / elapsed:6.0%} "
                f"{share.moving / elapsed:6.0%} {times:8.0%} "
                f"{late.typical * 1e3:6.3g} ms  {self._where.get(rank, '')}"
                + ("   <- all wait for it" if rank == culprit else "")
            )
        return "\n".join(_shortened(lines))

    def _summary(self) -> str:
        self._begin_anew()
        elapsed = max(time.monotonic() - self._first, 1e-9)
        share = self._shares.get(0, Share())
        worst = max(self._lost, key=lambda rank: self._lost[rank], default=0)
        lost = self._lost[worst] * 1e-6
        return "\n".join(
            (
                f"ringjax summary of rank 0: {share.calls} calls in {elapsed:.3g} s",
                f"  waiting for other ranks {share.waiting / elapsed:.1%}",
                f"  moving data             {share.moving / elapsed:.1%}",
                f"  the slowest was rank {worst}: others waited {lost:.3g} s for it",
            )
        )


def _shortened(lines: Sequence[str], most: int = 20) -> list[str]:
    """Of many ranks the first, and those that are pointed at."""
    if len(lines) <= most + 2:
        return list(lines)
    pointed = [line for line in lines[most + 2 :] if "<-" in line]
    left = len(lines) - 2 - most - len(pointed)
    return [*lines[: most + 2], *pointed, f"      ... and {left} more ranks"]


def to_standard_error(text: str) -> None:
    """Writes a block at once, so that lines of other ranks do not come between."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
