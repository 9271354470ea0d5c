"""Processes of one host: started each in a group of its own, and killed as trees.

Three nets keep every process from outliving the job. Children get a signal from the
kernel when the agent dies (PR_SET_PDEATHSIG); their own children are killed with the
process group; and whatever left its group is handed to the agent by the kernel when its
parent dies (PR_SET_CHILD_SUBREAPER), where `sweep` finds it. Linux only.
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
    """A running child: its process, and our ends of its pipes by stream name.

    Attributes:
        takes_group: when it fails, what is left of its group is killed.
    """

    process: subprocess.Popen[bytes]
    pipes: dict[str, int] = field(default_factory=dict)
    takes_group: bool = False

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        return self.process.pid

    def signal(self, number: int, *, alone: bool = False) -> None:
        """Signal the whole process group, or the process alone.

        Nothing once the leader is collected: its id may belong to someone else by
        then, and what it left behind is for `sweep`.
        """
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(self.pid, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _payload_file(payload: bytes) -> int:
    """An anonymous file with `payload`, at its beginning."""
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
    """Start a child in a new process group, bound to the life of this process.

    Args:
        argv: the command. With a payload, the number of the descriptor that takes the
            result is appended.
        env: its whole environment.
        payload: given to the child as its standard input; it then also gets a pipe for
            a result. Without one the standard input is empty.
        stdin, stdout: descriptors to give to the child instead, closed here.
        outlives: it is not killed with this process; another one ends it, by its pipes.

    Raises:
        OSError: the command cannot be run.
    """
    parent = os.getpid()

    def bind() -> None:
        if not outlives:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:  # the agent died before the line above
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
            preexec_fn=bind,  # safe: the agent has one thread
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
    """Kills what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap(leaders: Container[int] = ()) -> list[tuple[int, int]]:
    """Collect every child and adopted orphan that has ended: (pid, exit code).

    The exit code of a process that a signal ended is 128 + the signal, as in a shell.
    A leader that has failed takes its whole process group with it.
    """
    ended: list[tuple[int, int]] = []
    while True:
        try:
            # Not collected yet, its id and its group's cannot be somebody else's.
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
    """Process ids of all our descendants, from /proc.

    In a PID namespace with the /proc of its host the numbers there are of that one:
    what is there is found by them, and signalled by the numbers of here.
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
    with contextlib.suppress(OSError):  # no /proc at all
        own = int(os.readlink("/proc/self"))
    queue = [own]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found if own == os.getpid() else [n for pid in found for n in _here(pid)]


def _here(pid: int) -> list[int]:
    """The number of a process in our own PID namespace; none if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return [int(line.split()[-1])]
    return []


def childless() -> bool:
    """Whether no child is left, not even one to be collected."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def sweep(limit: float) -> list[tuple[int, int]]:
    """Kill and collect everything below this process; gives up after `limit` seconds.

    Having no child proves that there is no descendant either, since the kernel hands
    us the orphans.
    """
    deadline = time.monotonic() + limit
    ended = reap()
    while not childless() and time.monotonic() < deadline:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        ended += reap()
    return ended
