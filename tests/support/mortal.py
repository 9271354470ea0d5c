"""A rank whose death ringrun does not hear of until the test has seen what others do.

Ringrun gives the others a second and then ends them, which may be too soon on a busy
machine. In a rank: `apart`. In the test: `kill`, and in the end `Job.kill` for what the
rank was a child of.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.launch import Job


def apart() -> None:
    """Before `init`: makes this rank a child of the process that ringrun started."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        while code < 0:
            signal.pause()
        os._exit(code)
    print("its own pid:", os.getpid(), flush=True)


def kill(job: Job, rank: int) -> None:
    """Ends it as a machine does that loses power."""
    pid = job.output(rank).partition("its own pid: ")[2].split()[0]
    os.kill(int(pid), signal.SIGKILL)
