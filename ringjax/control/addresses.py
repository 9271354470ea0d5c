"""Addresses as text, sockets with the right options, the addresses of this machine.

Not for names of hosts in an engine's notation: see launch_environment.py. IPv4 and
IPv6.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import time
from collections.abc import Sequence

from ringjax.errors import StartupError

_SIOCGIFADDR = 0x8915


def parse(text: str) -> list[tuple[str, int]]:
    """Reads "host:port,[v6]:port,..."; ValueError if it is something else."""
    found = []
    for piece in filter(None, text.split(",")):
        host, colon, port = piece.strip().rpartition(":")
        number = int(port) if port.isdecimal() and len(port) <= 5 else 0
        if not (host and colon and 0 < number < 65536):
            raise ValueError(f"{piece!r}: expected host:port")
        found.append((host.removeprefix("[").removesuffix("]"), number))
    if not found:
        raise ValueError(f"{text!r}: expected host:port,...")
    return found


def show(host: str, port: int) -> str:
    """The inverse of `parse` for one address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on one address, never on all of them by accident."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_on(
    hosts: Sequence[str], port: int = 0, patience: float = 0.0
) -> list[socket.socket]:
    """Listening sockets on all of these addresses; of several, one may be gone.

    Args:
        patience: seconds for somebody to let go of the port who is about to end.

    Raises:
        StartupError: one cannot be had.
    """
    found: list[socket.socket] = []
    deadline = time.monotonic() + patience
    for host in hosts:
        try:
            found.append(_listen_patiently(host, port, deadline))
        except OSError as error:
            # An address of IPv6 is not usable at once, and interfaces lose theirs.
            last = host == hosts[-1] and not found
            if error.errno == errno.EADDRNOTAVAIL and not last:
                continue
            for sock in found:
                sock.close()
            where = show(host, port)
            raise StartupError(f"cannot listen on {where}: {error.strerror}") from error
    return found


def _listen_patiently(host: str, port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)  # who had the port ends, and nobody tells when


def connect(where: str | tuple[str, int], seconds: float) -> socket.socket:
    """Connects to a TCP address, or to a unix socket given as a string."""
    if isinstance(where, tuple):
        return socket.create_connection(where, timeout=seconds)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(where)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, failure_timeout: float) -> None:
    """Makes a TCP socket send at once, and notice a silent peer in that time."""
    if sock.family == socket.AF_UNIX:  # the kernel tells at once
        return
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, 3)
    # Keepalive does not count while data waits for an acknowledgement; this does.
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(failure_timeout * 1000))


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host.startswith("127.") or host == "::1"


def loopback() -> str:
    """The address by which this machine reaches itself; not all have one of IPv4."""
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            listen(host).close()
            return host
    return "127.0.0.1"  # errors will name it


def of_interfaces(names: str = "") -> list[str]:
    """The addresses of the named interfaces, or of all; the loopback ones come last.

    Raises:
        ValueError: an interface does not exist or has no address.
    """
    found = by_interface()
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in found:
            raise ValueError(
                f"network interface {name!r} does not exist or has no address; "
                f"this host has {', '.join(found)}"
            )
    addresses = [a for name in wanted or found for a in found[name]]
    return sorted(dict.fromkeys(addresses), key=is_loopback)


def by_interface() -> dict[str, list[str]]:
    """The addresses of each interface that has some."""
    found: dict[str, list[str]] = {}
    for name, address in (*_version_4(), *_version_6()):
        found.setdefault(name, []).append(address)
    return found


def _version_4() -> Sequence[tuple[str, str]]:
    found = []
    with (
        contextlib.suppress(OSError),  # a kernel without IPv4
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _version_6() -> Sequence[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:  # no IPv6 here
        return []
    # Link-local addresses (scope 20) mean nothing without the interface's number.
    return [
        (row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])))
        for row in rows
        if row[3] != "20"
    ]
