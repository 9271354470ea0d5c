"""The file that remembers what a network is like: constants of the cost model, by key.

One small JSON file for each network in the user's cache folder, replaced as a whole.
Nothing here is fatal: what cannot be read, is damaged, too old or impossible counts as
unknown, and what cannot be written is not remembered. What the constants mean is in
calibration.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from typing import Any

Cost = dict[str, float]

# Seconds that are possible, by the last word of a constant's name. A message that waits
# takes from a memory access to a second, a byte from 10 TB/s to 10 kB/s.
LIMITS = {"latency": (1e-8, 1.0), "message": (1e-9, 1.0), "byte": (1e-13, 1e-4)}
NAMES = tuple(f"{where}_{what}" for what in LIMITS for where in ("local", "remote"))
DAYS = 7
_FORMAT = 1
_MOST = 4096  # bytes of a file
_AHEAD = 3600.0  # seconds that another host's clock may be ahead


def is_sound(cost: object) -> bool:
    """Whether it has all constants and each one is possible."""
    if not isinstance(cost, dict) or cost.keys() != set(NAMES):
        return False
    return all(_is_possible(name, value) for name, value in cost.items())


def _is_possible(name: str, value: object) -> bool:
    low, high = LIMITS[name.partition("_")[2]]
    return isinstance(value, float) and math.isfinite(value) and low <= value <= high


def path_of(folder: str, network: Any) -> str:
    """The file of a network, which is described by anything that JSON can hold."""
    return os.path.join(folder, f"network-{_digest(network)[:24]}.json")


def _digest(network: Any) -> str:
    text = json.dumps([_FORMAT, network], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: str, network: Any) -> Cost | None:
    """What is known about a network, None if that is nothing."""
    if not folder:
        return None
    try:
        found = json.loads(_content(path_of(folder, network)))
        age = time.time() - float(found["when"])
        fresh = -_AHEAD <= age <= DAYS * 86400
        same = found["network"] == _digest(network)
        return found["cost"] if fresh and same and is_sound(found["cost"]) else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _content(path: str) -> str:
    """At most `_MOST` bytes of a regular file of ours; it is never waited for."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("not a file of this user")
        content = os.read(fd, _MOST + 1)
    finally:
        os.close(fd)
    if len(content) > _MOST:
        raise ValueError("too long")
    return content.decode()


def write(folder: str, network: Any, cost: Mapping[str, float]) -> bool:
    """Remembers a network from now on; says whether that worked."""
    if not folder:
        return False
    content = {"when": time.time(), "network": _digest(network), "cost": dict(cost)}
    text = json.dumps(content, indent=1) + "\n"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        _replace(path_of(folder, network), text)
        _forget_old(folder)
    except OSError:
        return False
    return True


def _replace(path: str, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    fd, temporary = tempfile.mkstemp(prefix=".network-", dir=os.path.dirname(path))
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _forget_old(folder: str) -> None:
    """Where hosts are born with new names all the time, files would pile up."""
    limit = time.time() - DAYS * 86400
    with os.scandir(folder) as entries:
        for entry in entries:
            ours = entry.name.removeprefix(".").startswith("network-")
            with contextlib.suppress(OSError):
                if ours and entry.stat(follow_symlinks=False).st_mtime < limit:
                    os.unlink(entry.path)
