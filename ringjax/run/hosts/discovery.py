"""The hosts that a user's script finds: run again and again, its last answer kept.

The script prints a line `host` or `host:slots` for each host, as for Horovod. One that
fails, hangs or prints something else changes nothing, and is complained about once.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from ringjax.run.hosts.slots import HostSlots, parse_discovered, without_aliases

PERIOD = 1.0  # seconds from the end of one run to the next, as in Horovod
LIMIT = 30.0  # seconds for one run


class CommandRunner(Protocol):
    """What runs a command on this machine; agent_pool.py has one."""

    def errand(self, argv: Sequence[str], done: Callable[[int, str, str], None]) -> int:
        """Starts it; `done` gets exit code, output and error output."""

    def signal(self, number: int, names: Sequence[int] | None = None) -> None:
        """Signals commands by the names that `errand` returned."""


class HostDiscovery:
    """Asks the script every second.

    Attributes:
        hosts: its last good answer, None before the first one.
        trouble: why the latest run was no good, empty if it was.
        hopeless: whether the very first run showed that it cannot be run at all.
    """

    name = "--host-discovery-script"

    def __init__(
        self,
        script: str,
        slots: int,
        runner: CommandRunner,
        warn: Callable[[str], None],
    ) -> None:
        self._script = script
        self._slots = slots
        self._runner = runner
        self._warn = warn
        self._now = self._next = -math.inf
        self._running: int | None = None
        self._runs = 0
        self._killed = False
        self.hosts: list[HostSlots] | None = None
        self.trouble = ""
        self.hopeless = False

    def tick(self, now: float) -> None:
        """Start a run if it is time, end one that takes too long."""
        self._now = now
        if now < self._next:
            return
        if self._running is None:
            self._runs += 1
            run = self._runs
            self._next = now + LIMIT
            self._killed = False
            # A file needs no shell, whatever its name; the rest may be a command.
            path = os.path.abspath(self._script)
            words = [path] if os.path.isfile(path) else ["sh", "-c", self._script]
            self._running = self._runner.errand(
                words, lambda code, out, err: self._answered(run, code, out, err)
            )
        elif not self._killed:
            self._killed = True
            self._next = now + PERIOD
            self._runner.signal(signal.SIGKILL, [self._running])
        else:  # it is gone, but something that it has started holds its output open
            self._answered(self._runs, 1, "", "")

    def without_own(self) -> None:
        """All hosts are found; there are no others."""

    def close(self) -> None:
        """Nothing to be closed: what runs, the fleet ends."""

    def _answered(self, run: int, code: int, out: str, err: str) -> None:
        if run != self._runs or self._running is None:
            return  # too late
        self._running = None
        self._next = self._now + PERIOD
        trouble = ""
        if self._killed:
            trouble = f"it took longer than {LIMIT:g} s"
        elif code:
            last = (err.strip().splitlines() or [""])[-1]
            trouble = f"exit code {code}" + (f": {last}" if last else "")
        else:
            try:
                found = parse_discovered(out, self._slots)
                self.hosts = without_aliases(found)
            except ValueError as error:
                trouble = str(error).removeprefix("--host-discovery-script: ")
        self.hopeless = self._runs == 1 and code in (126, 127)
        if trouble and not self.trouble and not self.hopeless:
            kept = "" if self.hosts is None else "; the hosts stay as they were"
            self._warn(f"--host-discovery-script {self._script}: {trouble}{kept}")
        self.trouble = trouble
