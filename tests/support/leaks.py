"""Finds leaks of a test or a job: processes, descriptors, threads, shared memory.

A listening port or an abstract unix socket exists exactly as long as a process holds
its descriptor. So no port is leaked if no process of the job is alive and this process
holds no new descriptor. Error texts describe sockets by their addresses.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# All processes of a job that a test starts inherit this variable, including orphans.
JOB_VARIABLE = "RINGJAX_TEST_JOB"
# The kinds of descriptors that ringjax opens. Other kinds do not count, because a
# framework that is imported during a test may open files.
_KINDS = ("socket:", "pipe:", "/memfd:", "anon_inode:[eventfd]", "anon_inode:[pidfd]")


# Warm servers, which outlive a test: the process id -> our socket to the server.
_ignored_children: dict[int, int] = {}


def ignore_child(pid: int, descriptor: int) -> None:
    """Excludes a child process and its descriptor from all checks."""
    _ignored_children[pid] = descriptor


def stop_ignoring(pid: int) -> None:
    """Includes a child process, which is about to end, in the checks again."""
    del _ignored_children[pid]


def processes(job: str) -> dict[int, str]:
    """Returns the living processes of a test job, including orphans, by process id."""
    needle = f"{JOB_VARIABLE}={job}".encode()
    found = {}
    for pid in _pids():
        if needle in _read(f"/proc/{pid}/environ").split(b"\0") and _state(pid) != "Z":
            found[pid] = _command(pid)
    return found


@dataclass(frozen=True)
class Snapshot:
    """The resources of this process at one moment, and ringjax's files in /dev/shm.

    Files of other programs in /dev/shm do not count.
    """

    children: dict[int, str]
    descriptors: dict[str, int]  # file or socket -> number of its descriptor
    threads: dict[int, str]
    shared_memory: frozenset[str]

    @staticmethod
    def take() -> Snapshot:
        own = [
            n for n in _names("/dev/shm") if n.startswith("ringjax") and not _planted(n)
        ]
        return Snapshot(
            children={
                p: text for p, text in _children().items() if p not in _ignored_children
            },
            descriptors={
                text: n
                for text, n in _descriptors().items()
                if n not in _ignored_children.values()
            },
            threads=_threads(),
            shared_memory=frozenset(own),
        )

    def leaked_since(self) -> list[str]:
        """Returns a sentence for each resource that is new since this snapshot."""
        now = Snapshot.take()
        sockets = _socket_names() if now.descriptors.keys() - self.descriptors else {}
        return [
            *(
                f"child process {pid}: {text}"
                for pid, text in now.children.items()
                if pid not in self.children
            ),
            *(
                f"descriptor {number}: {target} {sockets.get(target, '')}".rstrip()
                for target, number in now.descriptors.items()
                if target not in self.descriptors
            ),
            *(
                f"thread {text!r}"
                for ident, text in now.threads.items()
                if ident not in self.threads
            ),
            *(
                f"/dev/shm/{name}"
                for name in sorted(now.shared_memory - self.shared_memory)
                if not _used_by_other_process(f"/dev/shm/{name}")
            ),
        ]


def settle(check: Callable[[], list[str]], seconds: float = 2.0) -> list[str]:
    """Repeats `check` until it finds nothing or time is up. Returns the last result.

    After a process was killed, the kernel needs a moment to release its resources. The
    traceback of an exception keeps the variables of its frames until the garbage
    collector runs.
    """
    deadline = time.monotonic() + seconds
    while (found := check()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return found


def _pids() -> Iterator[int]:
    return (int(name) for name in _names("/proc") if name.isdigit())


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _state(pid: int) -> str:
    # The command name is in parentheses and may itself contain parentheses, so the
    # state follows the last closing parenthesis.
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2][1:2].decode()


def _children() -> dict[int, str]:
    pids = (
        int(word)
        for task in _names("/proc/self/task")
        for word in _read(f"/proc/self/task/{task}/children").split()
    )
    return {pid: _command(pid) or "a zombie that nobody waited for" for pid in pids}


def _command(pid: int) -> str:
    words = _read(f"/proc/{pid}/cmdline").split(b"\0")
    return b" ".join(words).decode(errors="replace").strip()


def _descriptors() -> dict[str, int]:
    found = {}
    for name in _names("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("anon_inode:"):
            target = f"{target}#{name}"  # all anonymous inodes have one name
        if target.startswith(_KINDS):
            found[target] = int(name)
    return found


def _socket_names() -> dict[str, str]:
    names = {}
    for line in _read("/proc/self/net/unix").decode(errors="replace").splitlines()[1:]:
        words = line.split()
        if len(words) > 7:
            names[f"socket:[{words[6]}]"] = f"unix {words[7]}"
    for family in ("tcp", "tcp6"):
        for line in _read(f"/proc/self/net/{family}").decode().splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            state = "listening" if words[3] == "0A" else "connected"
            names[f"socket:[{words[9]}]"] = f"{family} {state} on port {port}"
    return names


def _threads() -> dict[int, str]:
    """Returns Python's threads, and native threads whose names begin with ringjax."""
    found = {t.native_id or 0: t.name for t in threading.enumerate()}
    for task in _names("/proc/self/task"):
        name = _read(f"/proc/self/task/{task}/comm").decode(errors="replace").strip()
        if name.startswith("ringjax"):
            found.setdefault(int(task), name)
    return found


def _planted(name: str) -> bool:
    """Returns whether another process ran test_rank_items.py and leaked this file."""
    mine = f"ringjax-test-{os.getppid()}"
    return name.startswith("ringjax-test-") and name != mine


def _used_by_other_process(path: str) -> bool:
    """Returns whether a process that is not ours or our child's has `path` open."""
    family = {os.getpid(), *_children()}
    for pid in _pids():
        if pid in family:
            continue
        if path.encode() in _read(f"/proc/{pid}/maps"):
            return True
        for name in _names(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{name}") == path:
                    return True
            except OSError:
                continue
    return False
