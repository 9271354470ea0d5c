"""Connects and authenticates to a server of the job, such as the coordinator."""

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
    request: HandshakeRequest,
    deadline: float,
    server: str = "coordinator",
) -> tuple[socket.socket, SessionKeys, str]:
    """Connects to the first address whose server authenticates; tries each once.

    Args:
        addresses: "host:port,[v6]:port,...".
        deadline: the `time.monotonic` at which the attempts at all addresses end.
        server: the name of the server in errors.

    Returns:
        The socket, the keys of the session, and the server and its address as text.

    Raises:
        AuthenticationError: a server replies but does not have the secret.
        StartupError: the loopback interface of this host is down.
        OSError: no server replies. The cause is a `socket.gaierror` if this host cannot
            resolve a host name, perhaps because the name is not in the DNS yet.
    """
    unauthenticated, absent = None, None
    candidates = address.parse(addresses)
    # Another program may listen at the first address and never reply. The attempt at
    # this address must leave time for the other addresses.
    share = (deadline - time.monotonic()) / (2 * len(candidates))
    limit = min(HANDSHAKE_TIMEOUT, max(0.1, share))
    for host, port in candidates:
        where = f"the {server} at {address.show(host, port)}"
        try:
            return *_connect((host, port), secret, request, limit), where
        except AuthenticationError as error:
            unauthenticated = AuthenticationError(f"{where} {error}")
        except OSError as error:
            if error.errno == errno.ENETUNREACH and address.is_loopback(host):
                raise StartupError(
                    f"{where}: {error.strerror}: the loopback interface of this host "
                    "is down; bring it up: ip link set lo up"
                ) from None
            absent = OSError(f"{where}: {error.strerror or error}")
            absent.__cause__ = error
    raise unauthenticated or absent or OSError("no address")


def _connect(
    where: tuple[str, int], secret: bytes, request: HandshakeRequest, limit: float
) -> tuple[socket.socket, SessionKeys]:
    sock = socket.create_connection(where, timeout=limit)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock, authenticate(sock, secret, request, limit)
    except BaseException:
        sock.close()
        raise
