"""Checks of what the system allows on a host: descriptors, processes, CPUs, memory.

What ranks share is in sharing.py, settings of ringjax itself are in software.py.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ringjax.control import open_files
from ringjax.doctor.findings import Finding, HostContext, count, fail, ok, warn
from ringjax.errors import StartupError
from ringjax.links import memory as machine_memory
from ringjax.membership import job_credentials

_RANK = 512 << 20  # bytes that a rank of JAX has taken before its model
_BARE = 96 << 20  # bytes without which Python and numpy do not start
_ADDRESSES = 32 << 30  # bytes of address space that XLA maps and hardly uses
_LEAST_FILES = 64 << 20  # bytes
_THREADS = 64  # that a rank starts at least
_DESCRIPTORS = 10  # for each other rank


def descriptors(host: HostContext) -> Iterator[Finding]:
    """Those that a rank needs for the others, and some for the program."""
    needed = 256 + _DESCRIPTORS * (host.size - 1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if open_files.raise_limit(needed):
        text = f"at most {hard} (ulimit -Hn), and a rank needs {needed} (Docker: "
        text += "--ulimit nofile=65536, systemd: LimitNOFILE=)"
        mend = "sudo prlimit --pid $$ --nofile=65536"
        yield fail(text, mend, "outofdescriptors")
    else:
        yield ok(f"{needed} needed")


def address_space(host: HostContext) -> Iterator[Finding]:
    """It is not limited: XLA and CUDA map far more than they use."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < _ADDRESSES:
        text = f"limited to {limit >> 20} MiB (ulimit -v), which XLA and CUDA exceed"
        yield warn(text, "ulimit -v unlimited")


def processes(host: HostContext) -> Iterator[Finding]:
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


def cpus(host: HostContext) -> Iterator[Finding]:
    """Each rank has one: by affinity, and by the quota of the control group."""
    here = len(os.sched_getaffinity(0))
    share, group = quota()
    ranks = count(host.ranks, "rank")
    if share < min(here, host.ranks):
        text = (
            f"{ranks}, and the control group gives {share:.2g} of {here} CPUs (Docker: "
        )
        text += f"--cpus={host.ranks})"
        old = (group / _QUOTA).exists()
        value, file = ("-1", group / _QUOTA) if old else ("max", group / "cpu.max")
        yield warn(text, f"echo {value} | sudo tee {file}", "without-an-error")
    elif here < host.ranks:
        everywhere = os.cpu_count() or here
        text = f"{ranks} on {count(here, 'CPU')}"
        text += f" of {everywhere} (affinity)" if here < everywhere else ""
        yield warn(text, f"ringrun -np {here}", "without-an-error")
    else:
        yield ok(f"{here} for {ranks}")


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


def memory(host: HostContext) -> Iterator[Finding]:
    """As much as the ranks take before they have a model."""
    left = machine_memory.available()
    text = f"{left >> 20} MiB for {count(host.ranks, 'rank')}"
    mend = f"ringrun -np {left // _RANK}" if left >= _RANK else "free -m; ulimit -a"
    larger = "(Docker: --memory, Slurm: --mem)"
    if left < _BARE * host.ranks:
        yield fail(f"{text}: not enough to start them {larger}", mend, "peerlost")
    elif left < _RANK * host.ranks:
        text += f"; each takes some {_RANK >> 20} MiB before it has a model {larger}"
        yield warn(text, mend, "peerlost")
    else:
        yield ok(text)


_PLACES = ("/dev/shm", "$HOME")  # for temporary files, if the usual ones are not there


def temporary_files(host: HostContext) -> Iterator[Finding]:
    """There is a place for them, with room: XLA, Triton and many programs want one."""
    try:
        with tempfile.NamedTemporaryFile() as file:
            free = shutil.disk_usage(file.name).free
            where = os.path.dirname(file.name)
    except OSError as error:
        usable = [p for p in _PLACES if os.access(os.path.expandvars(p), os.W_OK)]
        mend = f"export TMPDIR={usable[0]}" if usable else "# mount a folder at /tmp"
        yield warn(f"none can be made: {error}", mend)
        return
    if free < _LEAST_FILES:
        text = f"{free >> 20} MiB are free in {where}"
        yield warn(text, f"du -sh {where}/* | sort -h  # or another TMPDIR")
    else:
        yield ok(f"{free >> 20} MiB free in {where}")
    try:  # as init() does in ranks of torchrun, mpirun or Slurm
        job_credentials.private_folder()
    except StartupError as error:
        yield warn(str(error), "env -u XDG_RUNTIME_DIR TMPDIR=/dev/shm COMMAND")
