"""Checks the resource limits of a host, and memory sharing between its ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ringjax.control import open_files
from ringjax.doctor.findings import Finding, HostContext, count, fail, ok, warn
from ringjax.errors import StartupError
from ringjax.links import memory as machine_memory
from ringjax.links import shared_memory, standing
from ringjax.membership import job_credentials

_RANK = 512 << 20  # bytes that a rank of JAX uses before it has a model
_BARE = 96 << 20  # bytes that Python and numpy need to start
_ADDRESSES = 32 << 30  # bytes of address space that XLA maps, most of them unused
_LEAST_FILES = 64 << 20  # bytes that temporary files need, at least
_THREADS = 64  # threads that a rank starts, at least
_DESCRIPTORS = 10  # descriptors that a rank needs for each of its neighbours
_QUOTA = "cpu.cfs_quota_us"  # file of a control group of version 1
_SHM = Path("/dev/shm")
_LEAST_SHM = 256 << 20  # bytes that /dev/shm should have; in Docker it has 64 MiB
_PAIR = 4 << 20  # bytes that two ranks share
_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER, see Documentation/admin-guide/LSM/Yama.rst
# A program that reads its parent's memory, as a rank reads the memory of another rank.
_READ = """
import ctypes, os, sys
fields = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
Piece = type("Piece", (ctypes.Structure,), {"_fields_": fields})
libc = ctypes.CDLL(None, use_errno=True)
here = ctypes.create_string_buffer(8)
mine = Piece(ctypes.addressof(here), 8)
theirs = Piece(int(sys.argv[2]), 8)
one = ctypes.c_ulong(1)
arguments = (ctypes.byref(mine), one, ctypes.byref(theirs), one, ctypes.c_ulong(0))
if libc.process_vm_readv(int(sys.argv[1]), *arguments) != 8:
    sys.exit(os.strerror(ctypes.get_errno()))
"""


def descriptors(host: HostContext) -> Iterator[Finding]:
    """Checks that a rank may open enough file descriptors for its neighbours."""
    needed = 256 + _DESCRIPTORS * standing.most_neighbours(host.size, host.ranks)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if open_files.raise_limit(needed):
        text = f"at most {hard} (ulimit -Hn), and a rank needs {needed} (Docker: "
        text += "--ulimit nofile=65536, systemd: LimitNOFILE=)"
        mend = "sudo prlimit --pid $$ --nofile=65536"
        yield fail(text, mend, "outofdescriptors")
    else:
        yield ok(f"{needed} needed")


def address_space(host: HostContext) -> Iterator[Finding]:
    """Checks the limit of the address space, of which XLA and CUDA reserve much."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < _ADDRESSES:
        text = f"limited to {limit >> 20} MiB (ulimit -v), which XLA and CUDA exceed"
        yield warn(text, "ulimit -v unlimited")


def processes(host: HostContext) -> Iterator[Finding]:
    """Checks how many more threads this user and this control group may start."""
    needed = _THREADS * host.ranks
    user = os.geteuid()
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The kernel does not apply this limit to root.
    if limit != resource.RLIM_INFINITY and user != 0:
        rest = max(0, limit - _threads_of(user))
        if rest < needed:
            text = f"{rest} more threads of this user (ulimit -u); {needed} are needed"
            yield warn(text, "ulimit -u unlimited")
    left, group = threads_left()
    if left < needed:
        text = f"the control group lets {max(0, left):.0f} more threads start; "
        text += f"{needed} are needed (Docker: --pids-limit, systemd: TasksMax=)"
        yield warn(text, f"echo max | sudo tee {group / 'pids.max'}")


def threads_left(root: Path = Path("/")) -> tuple[float, Path]:
    """Returns the smallest number of threads that a control group still allows."""

    def left(folder: Path, version: int) -> float:
        most = int((folder / "pids.max").read_text())
        return most - int((folder / "pids.current").read_text())

    return _strictest(root, "pids", left)


def quota(root: Path = Path("/")) -> tuple[float, Path]:
    """Returns the smallest number of CPUs that a control group allows."""

    def share(folder: Path, version: int) -> float:
        if version == 2:
            part, period = (folder / "cpu.max").read_text().split()
        else:
            part = (folder / _QUOTA).read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return float(part) / float(period) if float(part) > 0 else float("inf")

    return _strictest(root, "cpu", share)


def _strictest(
    root: Path, controller: str, read: Callable[[Path, int], float]
) -> tuple[float, Path]:
    """Returns the smallest value of this process's control groups, and its folder.

    The value is infinity if no control group has a limit. Tests replace `root`, the
    folder that contains /proc and the control groups.
    """
    least, where = float("inf"), root
    for folder, version in machine_memory.cgroups(root, controller):
        with contextlib.suppress(OSError, ValueError):  # the limit is missing or "max"
            if (value := read(folder, version)) < least:
                least, where = value, folder
    return least, where


def _threads_of(user: int) -> int:
    found = 0
    for place in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # the process has ended
            if place.stat().st_uid == user:
                found += len(list(place.iterdir()))
    return found


def cpus(host: HostContext) -> Iterator[Finding]:
    """Checks that CPU affinity and control groups allow each rank one CPU."""
    here = len(os.sched_getaffinity(0))
    share, group = quota()
    ranks = count(host.ranks, "rank")
    if share < min(here, host.ranks):
        text = f"{ranks}, and the control group gives {share:.2g} of {here} CPUs "
        text += f"(Docker: --cpus={host.ranks})"
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


def memory(host: HostContext) -> Iterator[Finding]:
    """Checks that all ranks fit into the free memory, not counting their models."""
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


_PLACES = ("/dev/shm", "$HOME")  # folders to suggest for temporary files


def temporary_files(host: HostContext) -> Iterator[Finding]:
    """Checks that programs can create temporary files, as XLA and Triton do."""
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
    try:  # init() needs the folder under torchrun, mpirun or Slurm
        job_credentials.private_folder()
    except StartupError as error:
        yield warn(str(error), "env -u XDG_RUNTIME_DIR TMPDIR=/dev/shm COMMAND")


def dev_shm(host: HostContext) -> Iterator[Finding]:
    """Checks the free space in /dev/shm, which NCCL and PyTorch's data loaders need.

    ringjax itself uses memfds and not /dev/shm.
    """
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


def memfd(host: HostContext) -> Iterator[Finding]:
    """Checks that the ranks of a host can share memory, and need not use TCP."""
    try:
        os.close(shared_memory.create(_PAIR, _PAIR))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        small = 0 <= limit < _PAIR
        mend = "ulimit -f unlimited" if small else "free -m"
        why = "files may not be that large (RLIMIT_FSIZE)" if small else error.strerror
        text = f"{_PAIR >> 20} MiB of shared memory cannot be had: {why}"
        yield warn(f"{text}; ranks would use TCP, which is slower", mend)
    else:
        yield ok("ranks of this host share memory")


def reading(host: HostContext) -> Iterator[Finding]:
    """Checks that ranks may read each other's memory, which long messages use."""
    number = ctypes.create_string_buffer(b"ringjax")
    # Allow descendants of this process to read its memory, as a rank allows its peers.
    # A kernel without Yama rejects this option, but does not restrict the reads either.
    ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)
    words = [sys.executable, "-S", "-c", _READ, str(os.getpid())]
    done = subprocess.run(
        [*words, str(ctypes.addressof(number))],
        capture_output=True,
        text=True,
        timeout=10,
    )
    if done.returncode == 0:
        yield ok("ranks may read each other's memory")
        return
    why = done.stderr.strip().rpartition("\n")[2]
    text = f"ranks may not read each other's memory ({why})"
    text += ": long messages between them are copied twice"
    yield warn(f"{text} (Docker: --cap-add=SYS_PTRACE)", "sysctl kernel.yama")
