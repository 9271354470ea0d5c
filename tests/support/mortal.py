"""Hides a rank's death from ringrun until the test has seen the other ranks' reaction.

A second after a death, ringrun ends the other ranks, which may be too soon on a busy
machine. The rank calls `apart`. The test calls `kill` and at the end `Job.kill` for the
rank's parent.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.launch import Job


def apart() -> None:
    """Forks: the rank becomes a child of the process that ringrun started.

    Call this before `init`.
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
