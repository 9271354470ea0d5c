"""Connects to a server of the job: the first address at which it proves itself."""

from __future__ import annotations

import errno
import socket
import time

from ringjax.control import addresses as address
from ringjax.control.handshake import HANDSHAKE_TIMEOUT, HandshakeRequest, authenticate
from ringjax.control.sealed_messages import SessionKeys
from ringjax.errors import AuthenticationError, StartupError

SERVER_RANK = -1


def connect_to_server(
    addresses: str,
    secret: bytes,
    introduction: HandshakeRequest,
    deadline: float,
    server: str = "coordinator",
) -> tuple[socket.socket, SessionKeys, str]:
    """Connects to the first address where a server proves itself; tries each once.

    Args:
        server: what it is called in errors.

    Returns:
        The socket, its keys, and where it leads to.

    Raises:
        AuthenticationError: what answers cannot prove itself.
        StartupError: this host has no loopback interface that is up.
        OSError: nobody answers; its cause is a `socket.gaierror` where the name of a
            host means nothing here, or not yet.
    """
    stranger, absent = None, None
    candidates = address.parse(addresses)
    # Something else that listens there and says nothing must not use up all the time.
    share = (deadline - time.monotonic()) / (2 * len(candidates))
    limit = min(HANDSHAKE_TIMEOUT, max(0.1, share))
    for host, port in candidates:
        where = f"the {server} at {address.show(host, port)}"
        try:
            return *_connect((host, port), secret, introduction, limit), where
        except AuthenticationError as error:
            stranger = AuthenticationError(f"{where} {error}")
        except OSError as error:
            if error.errno == errno.ENETUNREACH and address.is_loopback(host):
                raise StartupError(
                    f"{where}: {error.strerror}: the loopback interface of this host "
                    "is down; bring it up: ip link set lo up"
                ) from None
            absent = OSError(f"{where}: {error.strerror or error}")
            absent.__cause__ = error
    raise stranger or absent or OSError("no address")


def _connect(
    where: tuple[str, int], secret: bytes, introduction: HandshakeRequest, limit: float
) -> tuple[socket.socket, SessionKeys]:
    sock = socket.create_connection(where, timeout=limit)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock, authenticate(sock, secret, introduction, limit)
    except BaseException:
        sock.close()
        raise


def enable_keepalive(sock: socket.socket, seconds: float) -> None:
    """Has the kernel end a TCP connection whose other end is silent for so long."""
    interval = max(int(seconds / 3), 1)
    options = {
        socket.TCP_USER_TIMEOUT: max(int(1000 * seconds), 1),
        socket.TCP_KEEPIDLE: interval,
        socket.TCP_KEEPINTVL: interval,
        socket.TCP_KEEPCNT: 3,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
