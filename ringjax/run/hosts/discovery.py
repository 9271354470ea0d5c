"""Host discovery: runs the user's script every second and keeps its last valid output.

The script prints a line `host` or `host:slots` for each host, as for Horovod. If a run
fails, hangs or prints anything else, the list of hosts does not change, and ringrun
prints one line with the reason.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringjax.run.hosts.slots import HostSlots, merge_aliases, parse_discovered

if TYPE_CHECKING:
    from ringjax.run.hosts.agent_pool import AgentPool

PERIOD = 1.0  # seconds from the end of one run to the next, as in Horovod
LIMIT = 30.0  # seconds until a run of the script is killed


class ScriptDiscovery:
    """Runs a discovery script again and again.

    Attributes:
        hosts: the hosts in the last valid output, or None before the first valid
        output. problem: the reason why the latest run has failed, or "" if the run has
        succeeded. unusable: whether the first run has shown that the script cannot be
        started.
    """

    name = "--host-discovery-script"

    def __init__(
        self,
        script: str,
        slots: int,
        agents: AgentPool,
        warn: Callable[[str], None],
    ) -> None:
        self._script = script
        self._slots = slots
        self._agents = agents
        self._warn = warn
        self._now = self._next = -math.inf
        self._running: int | None = None
        self._runs = 0
        self._killed = False
        self.hosts: list[HostSlots] | None = None
        self.problem = ""
        self.unusable = False

    def tick(self, now: float) -> None:
        """Starts the next run when it is due, and kills a run that takes too long."""
        self._now = now
        if now < self._next:
            return
        if self._running is None:
            self._runs += 1
            run = self._runs
            self._next = now + LIMIT
            self._killed = False
            # Run a file without a shell, because a shell would split a path with
            # spaces.
            path = os.path.abspath(self._script)
            words = [path] if os.path.isfile(path) else ["sh", "-c", self._script]
            self._running = self._agents.run_command(
                words, lambda code, out, err: self._finish_run(run, code, out, err)
            )
        elif not self._killed:
            self._killed = True
            self._next = now + PERIOD
            self._agents.signal(signal.SIGKILL, [self._running])
        else:
            # The script was killed. A process that the script has started may keep the
            # output open, and then the agent never reports the end of the run.
            self._finish_run(self._runs, 1, "", "")

    def drop_static_hosts(self) -> None:
        """Does nothing, because a job with a discovery script has no static hosts."""

    def close(self) -> None:
        """Does nothing, because the local agent ends a script that still runs."""

    def _finish_run(self, run: int, code: int, out: str, err: str) -> None:
        if run != self._runs or self._running is None:
            return  # ignore the late report of a run that was killed
        self._running = None
        self._next = self._now + PERIOD
        problem = ""
        if self._killed:
            problem = f"it took longer than {LIMIT:g} s"
        elif code:
            last = (err.strip().splitlines() or [""])[-1]
            problem = f"exit code {code}" + (f": {last}" if last else "")
        else:
            try:
                found = parse_discovered(out, self._slots)
                self.hosts = merge_aliases(found)
            except ValueError as error:
                problem = str(error).removeprefix("--host-discovery-script: ")
        self.unusable = self._runs == 1 and code in (126, 127)
        if problem and not self.problem and not self.unusable:
            kept = "" if self.hosts is None else "; the hosts stay as they were"
            self._warn(f"--host-discovery-script {self._script}: {problem}{kept}")
        self.problem = problem
