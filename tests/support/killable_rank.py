"""Kills a rank in a way that ringrun does not notice.

ringrun ends all other ranks a second after a rank has ended. On a busy machine, this is
too soon for a test of the other ranks' reaction. So the rank calls `run_in_child`, and
the test calls `kill`. At the end the test calls `Job.kill` for the rank's parent.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.launch import Job


def run_in_child() -> None:
    """Continues the rank in a fork. Call this before `init`.

    The process that ringrun started waits for the child, and outlives a killed child.
    """
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        while code < 0:
            signal.pause()
        os._exit(code)
    print("its own pid:", os.getpid(), flush=True)


def kill(job: Job, rank: int) -> None:
    """Kills the rank, but not its parent."""
    pid = job.output(rank).partition("its own pid: ")[2].split()[0]
    os.kill(int(pid), signal.SIGKILL)
