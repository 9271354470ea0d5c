"""Unix sockets by which `ringjax top` finds the running jobs of this user.

The sockets are in a folder that only this user may enter, like the sockets of tmux. In
addition, each end checks which user owns the process at the other end.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

from ringjax.control import temporary
from ringjax.control.unix_peer import peer_uid

HELLO = b"ringjax top 1\n"  # the first bytes that a viewer sends
_NAME = re.compile(r"(\d+)-\d+\.sock")
_MAX_ADDRESS_BYTES = 100  # most bytes of an address; the kernel allows 107
_CONNECT_TIMEOUT = 2.0  # seconds until a connection attempt fails


class JobSocketError(OSError):
    """Error: the job does not exist, or it belongs to another user."""


def socket_folder() -> Path:
    """Returns the folder of this user's sockets, which need not exist.

    Raises:
        OSError: there is no folder for temporary files.

    Example:
        >>> socket_folder().name.startswith("ringjax-")
        True
    """
    base = temporary.folder()
    if not base:
        raise FileNotFoundError("there is no folder for temporary files")
    return Path(temporary.private_folder(base))


def listen() -> tuple[socket.socket, Path]:
    """Creates a listening socket and its file. The caller must remove the file."""
    folder = socket_folder()
    fd = temporary.open_private_folder(str(folder), make=True)
    sock = socket.socket(socket.AF_UNIX)
    try:
        for number in range(1000):
            path = folder / f"{os.getpid()}-{number}.sock"
            if _is_alive(path):  # another job in this process listens there
                continue
            # A killed process that had the same pid may have left the file behind.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            sock.bind(_address(path, fd))
            path.chmod(0o600)
            sock.listen(8)
            sock.setblocking(False)
            return sock, path
        raise FileExistsError(f"{folder}: too many jobs of this process")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(fd)


def connect(path: Path) -> socket.socket:
    """Connects to the ringrun that listens at `path`.

    Raises:
        JobSocketError: no process of this user listens at `path`.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        fd = temporary.open_private_folder(str(path.parent))
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
    """Returns a short address for a path, because an address has a size limit."""
    short = len(os.fsencode(path)) < _MAX_ADDRESS_BYTES
    return str(path) if short else f"/proc/self/fd/{folder}/{path.name}"


def connect_within(sock: socket.socket, address: str, seconds: float) -> None:
    """Connects a unix socket, and sets its timeout to `seconds`.

    Raises:
        OSError: no process listens at `address`, or the listener's queue stays full.
    """
    deadline = time.monotonic() + seconds
    sock.settimeout(seconds)
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:  # the listener's queue is full
            if time.monotonic() > deadline:
                raise
            # Poll: `connect` does not wait for room in the queue if the socket has a
            # timeout, and the kernel does not report when there is room again.
            time.sleep(0.02)


def _is_alive(path: Path) -> bool:
    try:
        connect(path).close()
    except JobSocketError:
        return False
    return True


def find_jobs() -> dict[int, list[Path]]:
    """Returns the sockets of this user's jobs, by the process id of ringrun.

    The function also removes the files of processes that were killed.
    """
    found: dict[int, list[Path]] = {}
    with contextlib.suppress(OSError):
        os.close(temporary.open_private_folder(str(socket_folder())))
        for path in sorted(socket_folder().iterdir()):
            if (match := _NAME.fullmatch(path.name)) is None:
                continue
            if _is_alive(path):
                found.setdefault(int(match[1]), []).append(path)
            elif not Path(f"/proc/{match[1]}").exists():
                path.unlink(missing_ok=True)
    return found
