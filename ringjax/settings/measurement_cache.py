"""Small files in the user's cache folder that remember what was measured.

One JSON file for each thing, replaced as a whole. Nothing here is fatal: what cannot be
read, is damaged or too old counts as unknown, and what cannot be written is not
remembered. Whether a value is possible, those who read it must judge.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from typing import Any

DAYS = 7
_FORMAT = 1
_MOST = 4096  # bytes of a file
_AHEAD = 3600.0  # seconds that another host's clock may be ahead


def path_of(folder: str, kind: str, thing: Any) -> str:
    """The file of a thing, which is described by anything that JSON can hold."""
    return os.path.join(folder, f"{kind}-{_digest(thing)[:24]}.json")


def _digest(thing: Any) -> str:
    text = json.dumps([_FORMAT, thing], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: str, kind: str, thing: Any) -> Any:
    """What is remembered of a thing, None if that is nothing."""
    if not folder:
        return None
    try:
        found = json.loads(_content(path_of(folder, kind, thing)))
        age = time.time() - float(found["when"])
        fresh = -_AHEAD <= age <= DAYS * 86400
        same = found["thing"] == _digest(thing)
        return found["value"] if fresh and same else None
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


def write(folder: str, kind: str, thing: Any, value: Any) -> bool:
    """Remembers a thing from now on; says whether that worked."""
    if not folder:
        return False
    content = {"when": time.time(), "thing": _digest(thing), "value": value}
    text = json.dumps(content, indent=1) + "\n"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        _replace(path_of(folder, kind, thing), kind, text)
        _forget_old(folder, kind)
    except OSError:
        return False
    return True


def _replace(path: str, kind: str, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    fd, temporary = tempfile.mkstemp(prefix=f".{kind}-", dir=os.path.dirname(path))
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _forget_old(folder: str, kind: str) -> None:
    """Where hosts are born with new names all the time, files would pile up."""
    limit = time.time() - DAYS * 86400
    with os.scandir(folder) as entries:
        for entry in entries:
            ours = entry.name.removeprefix(".").startswith(f"{kind}-")
            with contextlib.suppress(OSError):
                if ours and entry.stat(follow_symlinks=False).st_mtime < limit:
                    os.unlink(entry.path)
