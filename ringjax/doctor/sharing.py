"""Checks of what ranks of one host share: /dev/shm, memfds, each other's memory."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ringjax.doctor.findings import Finding, HostContext, ok, warn
from ringjax.links import shared_memory

_SHM = Path("/dev/shm")
_LEAST_SHM = 256 << 20  # bytes; Docker gives 64 MiB
_PAIR = 4 << 20  # bytes that two ranks share
_SET_PTRACER = 0x59616D61  # of prctl, see Documentation/admin-guide/LSM/Yama.rst
# Another process, as another rank is: not this one's parent.
_READ = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
here = ctypes.create_string_buffer(8)
mine = Piece(ctypes.addressof(here), 8)
theirs = Piece(int(sys.argv[2]), 8)
one = ctypes.c_ulong(1)
arguments = (ctypes.byref(mine), one, ctypes.byref(theirs), one, ctypes.c_ulong(0))
if libc.process_vm_readv(int(sys.argv[1]), *arguments) != 8:
    sys.exit(os.strerror(ctypes.get_errno()))
"""


def dev_shm(host: HostContext) -> Iterator[Finding]:
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


def memfd(host: HostContext) -> Iterator[Finding]:
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


def reading(host: HostContext) -> Iterator[Finding]:
    """Ranks may read each other's memory, which they do for long messages."""
    number = ctypes.create_string_buffer(b"ringjax")
    # As ranks do for their parent and its descendants; only Yama knows of it.
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
