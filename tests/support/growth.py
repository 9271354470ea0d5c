"""Finds processes of a test job whose private memory or descriptors grow.

The first sample after a settling time is compared with the minimum of the last samples,
because only resources that are never released are a leak.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field

from support import leaks, strangers

SETTLED = 20.0  # seconds until a process has started completely
LAST = 5  # samples
DESCRIPTORS = 8  # more new descriptors are a leak; a few are open for a short time
PEER = 6  # descriptors that a rank needs for each peer
BYTES = 24 << 20  # allowed growth per `HOUR`, and during a shorter job
HOUR = 3600.0


@dataclass
class Process:
    """A process of the job with its samples of memory and descriptors."""

    command: str
    since: float
    at: float = 0.0
    first: tuple[int, int] | None = None  # bytes, descriptors
    last: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAST))


class GrowthMonitor:
    """Watches all processes of a test job, including the launcher.

    Args:
        job: the id of the job, as for `leaks.processes`.
        peers: the number of ranks that may have joined since a rank's first sample.

    Attributes:
        processes: all processes by process id, including ended processes.
    """

    def __init__(self, job: str, peers: int = 0) -> None:
        self._job = job
        self._descriptors = DESCRIPTORS + PEER * peers
        self.processes: dict[int, Process] = {}

    def take_samples(self) -> None:
        """Takes a sample of every running process."""
        now = time.monotonic()
        with contextlib.suppress(OSError):  # a process ended: sample the rest next time
            memory, fds = strangers.memory(self._job), strangers.descriptors(self._job)
            for pid, command in leaks.processes(self._job).items():
                seen = self.processes.setdefault(pid, Process(command, now))
                if pid in memory and pid in fds and now - seen.since > SETTLED:
                    sample = memory[pid], fds[pid]
                    seen.first = seen.first or sample
                    seen.last.append(sample)
                    seen.at = now

    def leaks(self) -> list[str]:
        """Returns a sentence for each process that has grown."""
        most = self._descriptors
        return [text for p in self.processes.values() for text in _grown(p, most)]

    def report(self) -> list[str]:
        """Returns a line for each process of ringrun and for the two oldest others."""
        watched = [p for p in self.processes.values() if p.first is not None]
        ours = [p for p in watched if "ringjax.run" in p.command]
        others = sorted(
            (p for p in watched if p not in ours), key=lambda p: p.since - p.at
        )
        return [_line(p) for p in (*ours, *others[:2])]


def _now(process: Process) -> tuple[int, int]:
    return min(b for b, _ in process.last), min(n for _, n in process.last)


def _line(process: Process) -> str:
    first, last = process.first or (0, 0), _now(process)
    words = process.command.split()
    name = next((w for w in words if w.startswith("ringjax.run")), words[1])
    return (
        f"{name.rpartition('/')[2]}: {first[0] / 2**20:.1f} -> "
        f"{last[0] / 2**20:.1f} MiB, {first[1]} -> {last[1]} descriptors in "
        f"{process.at - process.since:.0f} s"
    )


def _grown(process: Process, descriptors: int) -> list[str]:
    if process.first is None:
        return []
    most = BYTES * max(1.0, (process.at - process.since) / HOUR)
    (before, fds), (after, fds_now) = process.first, _now(process)
    if after - before > most or fds_now - fds > descriptors:
        return [f"it has grown: {_line(process)}"]
    return []
