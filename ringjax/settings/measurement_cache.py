"""Measurement cache: small files in the user's cache folder, one for each measurement.

A file holds one JSON object and is replaced as a whole. No error is fatal: a file that
is unreadable, damaged or too old counts as missing, and a value that cannot be written
is not cached. The callers check whether a cached value is plausible.
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

MAX_AGE_DAYS = 7
_FORMAT = 1
_MAX_BYTES = 4096  # the largest size of a file
_CLOCK_TOLERANCE = 3600.0  # seconds that the clock of another host may be ahead


def path_of(folder: str, kind: str, key: object) -> str:
    """Returns the path of a measurement's file in the cache folder.

    `kind` names the measurement and begins the name of the file. `key`, a value that
    JSON can represent, describes the measured object.
    """
    return os.path.join(folder, f"{kind}-{_digest(key)[:24]}.json")


def _digest(key: object) -> str:
    text = json.dumps([_FORMAT, key], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: str, kind: str, key: object) -> Any:
    """Returns the cached JSON value, or None. `path_of` describes the arguments."""
    if not folder:
        return None
    try:
        content = json.loads(_content(path_of(folder, kind, key)))
        age = time.time() - float(content["when"])
        is_fresh = -_CLOCK_TOLERANCE <= age <= MAX_AGE_DAYS * 86400
        is_same = content["thing"] == _digest(key)
        return content["value"] if is_fresh and is_same else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _content(path: str) -> str:
    # Other users may be able to write to the folder, so follow no symbolic link, do not
    # block on a pipe (O_NONBLOCK), and accept only a regular file of this process's
    # user.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("not a file of this user")
        content = os.read(fd, _MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > _MAX_BYTES:
        raise ValueError("too long")
    return content.decode()


def write(folder: str, kind: str, key: object, value: object) -> bool:
    """Caches a JSON value; returns whether this succeeded. Arguments: see `path_of`."""
    if not folder:
        return False
    content = {"when": time.time(), "thing": _digest(key), "value": value}
    text = json.dumps(content, indent=1) + "\n"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        _replace(path_of(folder, kind, key), kind, text)
        _delete_old(folder, kind)
    except OSError:
        return False
    return True


def _replace(path: str, kind: str, text: str) -> None:
    # A rename is atomic: other processes read either the old file or the new file.
    fd, temporary = tempfile.mkstemp(prefix=f".{kind}-", dir=os.path.dirname(path))
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _delete_old(folder: str, kind: str) -> None:
    # Cloud hosts often have new names, so files for old host names would accumulate.
    limit = time.time() - MAX_AGE_DAYS * 86400
    with os.scandir(folder) as entries:
        for entry in entries:
            is_ours = entry.name.removeprefix(".").startswith(f"{kind}-")
            with contextlib.suppress(OSError):
                if is_ours and entry.stat(follow_symlinks=False).st_mtime < limit:
                    os.unlink(entry.path)
