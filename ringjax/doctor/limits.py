"""Checks of what the system allows on a host: memory, descriptors, processes, CPUs.

Settings of ringjax itself are in software.py.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ringjax.control import open_files
from ringjax.doctor.finding import Finding, Host, fail, ok, warn
from ringjax.links import memory as machine_memory
from ringjax.links import shared_memory

_SHM = Path("/dev/shm")
_LEAST_SHM = 256 << 20  # bytes; Docker gives 64 MiB
_RANK = 512 << 20  # bytes that a rank of JAX has taken before its model
_BARE = 96 << 20  # bytes without which Python and numpy do not start
_ADDRESSES = 32 << 30  # bytes of address space that XLA maps and hardly uses
_THREADS = 64  # that a rank starts at least
_DESCRIPTORS = 10  # for each other rank
_PAIR = 4 << 20  # bytes that two ranks share


def dev_shm(host: Host) -> Iterator[Finding]:
    """There is room: ringjax takes memfds, but NCCL and PyTorch's loaders need it."""
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        text = f"{error.strerror}: NCCL and PyTorch's loaders need it"
        yield warn(text, "sudo mount -t tmpfs tmpfs /dev/shm")
        return
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    if not os.access(_SHM, os.W_OK):
        yield warn("this user may not write there", "sudo chmod 1777 /dev/shm")
    elif size < _LEAST_SHM:
        text = f"{size >> 20} MiB are too few for NCCL and PyTorch's loaders (Docker: "
        mend = "sudo mount -o remount,size=8g /dev/shm"
        yield warn(f"{text}--shm-size=8g)", mend)
    elif free < _LEAST_SHM:
        text = f"{free >> 20} of {size >> 20} MiB are free: something was left there"
        yield warn(text, "ls -lS /dev/shm  # and remove what nobody uses")
    else:
        yield ok(f"{free >> 20} MiB free")


def memfd(host: Host) -> Iterator[Finding]:
    """Ranks of a host can share memory; they would use TCP otherwise."""
    try:
        os.close(shared_memory.make(_PAIR))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        small = 0 <= limit < _PAIR
        mend = "ulimit -f unlimited" if small else "free -m"
        why = "files may not be that large (RLIMIT_FSIZE)" if small else error.strerror
        text = f"{_PAIR >> 20} MiB of shared memory cannot be had: {why}"
        yield warn(f"{text}; ranks would use TCP, which is slower", mend)
    else:
        yield ok("ranks of this host share memory")


def descriptors(host: Host) -> Iterator[Finding]:
    """Those that a rank needs for the others, and some for the program."""
    needed = 256 + _DESCRIPTORS * (host.size - 1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if open_files.allow(needed):
        text = f"at most {hard} (ulimit -Hn), and a rank needs {needed} (Docker: "
        text += "--ulimit nofile=65536, systemd: LimitNOFILE=)"
        mend = "sudo prlimit --pid $$ --nofile=65536"
        yield fail(text, mend, "outofdescriptors")
    else:
        yield ok(f"{needed} needed")


def address_space(host: Host) -> Iterator[Finding]:
    """It is not limited: XLA and CUDA map far more than they use."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < _ADDRESSES:
        text = f"limited to {limit >> 20} MiB (ulimit -v), which XLA and CUDA exceed"
        yield warn(text, "ulimit -v unlimited")


def processes(host: Host) -> Iterator[Finding]:
    """Ranks may start the threads that they have: this user, and this control group."""
    needed = _THREADS * host.ranks
    user = os.geteuid()
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and user != 0:  # root has no limit
        rest = max(0, limit - _threads_of(user))
        if rest < needed:
            text = f"{rest} more threads of this user (ulimit -u); {needed} are needed"
            yield warn(text, "ulimit -u unlimited")
    left, group = threads_left()
    if left < needed:
        text = (
            f"the control group lets {max(0, left):.0f} more threads start; {needed} "
        )
        text += "are needed (Docker: --pids-limit, systemd: TasksMax=)"
        yield warn(text, f"echo max | sudo tee {group / 'pids.max'}")


def threads_left(root: Path = Path("/")) -> tuple[float, Path]:
    """How many more the strictest control group allows, and which; else infinity.

    Args:
        root: where /proc and the control groups are, for tests.
    """
    least, where = float("inf"), root
    for folder, _ in machine_memory.groups(root, "pids"):
        try:
            most = int((folder / "pids.max").read_text())
            left = most - int((folder / "pids.current").read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if left < least:
            least, where = left, folder
    return least, where


def _threads_of(user: int) -> int:
    """How many threads a user has."""
    count = 0
    for place in Path("/proc").glob("[0-9]*/task"):
        try:
            if place.stat().st_uid == user:
                count += len(list(place.iterdir()))
        except OSError:  # it has ended
            continue
    return count


def cpus(host: Host) -> Iterator[Finding]:
    """Each rank has one: by affinity, and by the quota of the control group."""
    here = len(os.sched_getaffinity(0))
    share, group = quota()
    count = f"{host.ranks} rank{'s' * (host.ranks > 1)}"
    if share < min(here, host.ranks):
        text = (
            f"{count}, and the control group gives {share:.2g} of {here} CPUs (Docker: "
        )
        text += f"--cpus={host.ranks})"
        old = (group / _QUOTA).exists()
        value, file = ("-1", group / _QUOTA) if old else ("max", group / "cpu.max")
        yield warn(text, f"echo {value} | sudo tee {file}", "without-an-error")
    elif here < host.ranks:
        everywhere = os.cpu_count() or here
        text = f"{count} on {here} CPUs"
        text += f" of {everywhere} (affinity)" if here < everywhere else ""
        yield warn(text, f"ringrun -np {here}", "without-an-error")
    else:
        yield ok(f"{here} for {count}")


_QUOTA = "cpu.cfs_quota_us"


def quota(root: Path = Path("/")) -> tuple[float, Path]:
    """The least number of CPUs that a control group gives, and which; else infinity.

    Args:
        root: where /proc and the control groups are, for tests.
    """
    least, where = float("inf"), root
    for folder, version in machine_memory.groups(root, "cpu"):
        try:
            if version == 2:
                part, period = (folder / "cpu.max").read_text().split()
            else:
                part = (folder / _QUOTA).read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            given = float(part) / float(period)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if 0 < given < least:
            least, where = given, folder
    return least, where


def memory(host: Host) -> Iterator[Finding]:
    """As much as the ranks take before they have a model."""
    left = machine_memory.available()
    text = f"{left >> 20} MiB for {host.ranks} rank{'s' * (host.ranks > 1)}"
    mend = f"ringrun -np {left // _RANK}" if left >= _RANK else "free -m; ulimit -a"
    larger = "(Docker: --memory, Slurm: --mem)"
    if left < _BARE * host.ranks:
        yield fail(f"{text}: not enough to start them {larger}", mend, "peerlost")
    elif left < _RANK * host.ranks:
        text += f"; each takes some {_RANK >> 20} MiB before it has a model {larger}"
        yield warn(text, mend, "peerlost")
    else:
        yield ok(text)
