"""Where a job's ringrun can be found by `ringjax top` of the same user.

A unix socket in a folder that nobody else may enter, as tmux has it; who connects and
who is connected to are asked of the kernel, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from pathlib import Path

from ringjax.control import temporary
from ringjax.control.unix_peer import peer_uid

HELLO = b"ringjax top 1\n"  # what somebody says first who wants to look
_NAME = re.compile(r"(\d+)-\d+\.sock")
_MAX_ADDRESS_BYTES = 100  # bytes of a path that may be an address
_CONNECT_TIMEOUT = 2.0  # seconds to connect


class JobSocketError(OSError):
    """There is no job to connect to, or it is not ours."""


def socket_folder() -> Path:
    """Where the sockets of this user are; may not be there.

    Raises:
        OSError: there is no folder for temporary files.

    Example:
        >>> socket_folder().name.startswith("ringjax-")
        True
    """
    base = temporary.folder()
    if not base:
        raise FileNotFoundError("there is no folder for temporary files")
    return Path(base) / f"ringjax-{os.geteuid()}"


def _open_folder(place: Path) -> int:
    """A descriptor of the folder.

    Raises:
        OSError: it is not there, or others may enter it.
    """
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(f"{place}: it is not this user's alone")
    return fd


def listen() -> tuple[socket.socket, Path]:
    """Makes this process's socket; `remove` it at the end.

    Raises:
        OSError: there is no place for it.
    """
    place = socket_folder()
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    fd = _open_folder(place)
    sock = socket.socket(socket.AF_UNIX)
    try:
        for number in range(1000):
            name = f"{os.getpid()}-{number}.sock"
            path = place / name
            if _is_alive(path):  # another job of this process
                continue
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            sock.bind(_address(path, fd))
            path.chmod(0o600)
            sock.listen(8)
            sock.setblocking(False)
            return sock, path
        raise FileExistsError(f"{place}: too many jobs of this process")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(fd)


def connect(path: Path) -> socket.socket:
    """A connection with the ringrun behind a socket.

    Raises:
        JobSocketError: it is not there, or somebody else's.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        fd = _open_folder(path.parent)
        try:
            connect_within(sock, _address(path, fd), _CONNECT_TIMEOUT)
        finally:
            os.close(fd)
        if (uid := peer_uid(sock)) != os.geteuid():
            raise PermissionError(f"it belongs to user {uid}")
    except OSError as error:
        sock.close()
        raise JobSocketError(f"{path}: {error.strerror or error}") from None
    return sock


def _address(path: Path, folder: int) -> str:
    """Of a socket; by its folder's descriptor if it is longer than one may be."""
    short = len(os.fsencode(path)) < _MAX_ADDRESS_BYTES
    return str(path) if short else f"/proc/self/fd/{folder}/{path.name}"


def connect_within(sock: socket.socket, address: str, seconds: float) -> None:
    """Connects a unix socket within that time, which also is its timeout then.

    Raises:
        OSError: nobody listens there, or too many wait.
    """
    deadline = time.monotonic() + seconds
    sock.settimeout(seconds)
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:  # others wait there, too
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # a full unix socket wakes nobody who wants to connect


def _is_alive(path: Path) -> bool:
    try:
        connect(path).close()
    except JobSocketError:
        return False
    return True


def find_jobs() -> dict[int, list[Path]]:
    """The sockets of this user's jobs, by ringrun's process id.

    Those that a killed ringrun has left are removed.
    """
    found: dict[int, list[Path]] = {}
    with contextlib.suppress(OSError):
        os.close(_open_folder(socket_folder()))
        for path in sorted(socket_folder().iterdir()):
            if (match := _NAME.fullmatch(path.name)) is None:
                continue
            if _is_alive(path):
                found.setdefault(int(match[1]), []).append(path)
            elif not Path(f"/proc/{match[1]}").exists():
                path.unlink(missing_ok=True)
    return found
