"""Child processes of an agent: starts each in its own process group, and kills trees.

Three mechanisms prevent a process from outliving the job:

* The kernel sends SIGKILL to the children when the agent dies (PR_SET_PDEATHSIG).
* A signal to a child goes to its whole process group.
* If a process has left its group and its parent dies, the process becomes a child of
  the agent (PR_SET_CHILD_SUBREAPER), where `kill_descendants` finds the process.

Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class ChildProcess:
    """A child process, and the agent's ends of the child's pipes, by stream name.

    Attributes:
        kills_group: whether a failure of the child kills its whole process group.
    """

    process: subprocess.Popen[bytes]
    pipes: dict[str, int] = field(default_factory=dict)
    kills_group: bool = False

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the child's process group."""
        return self.process.pid

    def signal(self, number: int, *, alone: bool = False) -> None:
        """Sends a signal to the whole process group, or only to the process.

        Does nothing if the child was already collected by `waitpid`, because the kernel
        may have reused its process id. `kill_descendants` finds the remaining processes
        of the group.
        """
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(self.pid, number)


def become_subreaper() -> None:
    """Makes this process adopt every descendant whose parent has died."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _payload_file(payload: bytes) -> int:
    """Returns an anonymous file that contains `payload`, positioned at its start."""
    descriptor = os.memfd_create("ringrun-task")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(payload)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    payload: bytes | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    outlives: bool = False,
) -> ChildProcess:
    """Starts a child in a new process group, which ends with this process.

    Args:
        argv: the command.
        env: the whole environment of the child.
        payload: standard input of the child. With a payload the child also receives a
            pipe for a result, whose descriptor is the last word of its command line.
            Without `payload` and `stdin` the child's standard input is empty.
        stdin, stdout: descriptors for the child. This process closes its own copies.
        outlives: whether the child survives this process. Such a child must end when
            the other ends of its pipes are closed.

    Raises OSError if the command cannot be run.
    """
    parent = os.getpid()

    def bind() -> None:
        if not outlives:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            # If the agent died before the call above, the kernel will send no signal.
            if os.getppid() != parent:
                os._exit(1)
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    argv = list(argv)
    ours: dict[str, int] = {}
    theirs: list[int] = []
    passed: list[int] = []
    try:
        if payload is not None:
            stdin = _payload_file(payload)
            ours["result"], result = os.pipe()
            theirs.append(result)
            passed.append(result)
            argv.append(str(result))
        if stdin is not None:
            theirs.append(stdin)
        if stdout is None:
            ours["stdout"], stdout = os.pipe()
        theirs.append(stdout)
        ours["stderr"], stderr = os.pipe()
        theirs.append(stderr)
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=passed,
            process_group=0,
            preexec_fn=bind,  # preexec_fn is safe because the agent has only one thread
        )
    except BaseException:
        for descriptor in ours.values():
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    return ChildProcess(process, ours)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap(leaders: Container[int] = ()) -> list[tuple[int, int]]:
    """Collects every child and adopted orphan that has ended.

    If a process in `leaders`, a set of process ids, has failed, kills its process
    group.

    Returns:
        The process id and the exit code of each process. The code is 128 + N, as in a
        shell, if signal N has ended the process.
    """
    ended: list[tuple[int, int]] = []
    while True:
        try:
            # WNOWAIT leaves the process uncollected. Until `waitpid` collects the
            # process, the kernel cannot reuse its id for another process or group, so
            # killing the group below is safe.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ended
        if found is None:
            return ended
        failed = found.si_code != os.CLD_EXITED or found.si_status != 0
        if failed and found.si_pid in leaders:
            kill_group(found.si_pid)
        pid, status = os.waitpid(found.si_pid, 0)
        code = os.waitstatus_to_exitcode(status)
        ended.append((pid, code if code >= 0 else 128 - code))


def _descendants() -> list[int]:
    """Returns the process ids of all descendants of this process, from /proc.

    A container may have its own PID namespace, but the /proc of its host. Then this
    function translates the process ids of the host, which /proc contains.
    """
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    own = os.getpid()
    with contextlib.suppress(OSError):  # /proc may not be mounted
        own = int(os.readlink("/proc/self"))
    queue = [own]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return (
        found if own == os.getpid() else [n for pid in found for n in _own_number(pid)]
    )


def _own_number(pid: int) -> list[int]:
    """Returns a process's id in this PID namespace, or [] if it has no such id."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return [int(line.split()[-1])]
    return []


def has_no_children() -> bool:
    """Returns whether this process has neither running children nor zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def kill_descendants(limit: float) -> list[tuple[int, int]]:
    """Kills and collects all descendants of this process within `limit` seconds.

    Stops when this process has no child: then it has no descendant either, because it
    adopts orphans (`become_subreaper`). Returns process ids and exit codes, as `reap`
    does.
    """
    deadline = time.monotonic() + limit
    ended = reap()
    while not has_no_children() and time.monotonic() < deadline:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # a process needs a moment to die after SIGKILL
        ended += reap()
    return ended
