"""Parses addresses, opens TCP sockets, and lists the addresses of this host.

IPv4 and IPv6 are supported. launch_environment.py and slurm.py parse the notations in
which batch systems name hosts.
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
    """Parses "host:port,[v6]:port,...". Raises ValueError for any other text."""
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
    """Formats an address as text that `parse` accepts."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int = 0) -> socket.socket:
    """Opens a listening TCP socket on one address, never on all addresses."""
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
    hosts: Sequence[str], port: int = 0, timeout: float = 0.0
) -> list[socket.socket]:
    """Opens a listening socket on each of these addresses.

    Skips addresses that this host does not have any more, unless no address remains.

    Args:
        port: the port on each address. With 0, each socket has another free port.
        timeout: seconds to wait until another process, which is ending, frees the port.

    Raises:
        StartupError: a socket cannot be opened.
    """
    found: list[socket.socket] = []
    deadline = time.monotonic() + timeout
    for host in hosts:
        try:
            found.append(_listen_until(host, port, deadline))
        except OSError as error:
            # A new IPv6 address is not usable at once, and an old address may be gone.
            last = host == hosts[-1] and not found
            if error.errno == errno.EADDRNOTAVAIL and not last:
                continue
            for sock in found:
                sock.close()
            where = show(host, port)
            raise StartupError(f"cannot listen on {where}: {error.strerror}") from error
    return found


def _listen_until(host: str, port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)  # poll: the kernel does not notify when a port becomes free


def connect(where: str | tuple[str, int], seconds: float) -> socket.socket:
    """Connects to a TCP address, or to a unix socket if `where` is a string.

    `seconds` limits the attempt, and later each operation on the returned socket.
    """
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


def set_link_options(
    sock: socket.socket, failure_timeout: float, interval: int
) -> None:
    """Disables Nagle's algorithm on the socket of a link, and enables keepalive.

    A unix socket needs no options, because the kernel reports immediately when the peer
    has closed the socket.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(sock, failure_timeout, interval)


def enable_keepalive(sock: socket.socket, seconds: float, interval: int = 0) -> None:
    """Makes the kernel end a TCP connection if the peer is silent for `seconds`.

    The kernel does so even while this process is busy or stopped. A host that loses
    power sends no FIN, so without keepalive its connections would stay open.

    Args:
        interval: seconds between two probes; pass 0 for a third of `seconds`.
    """
    interval = interval or max(int(seconds / 3), 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, 3),
        # The kernel sends no probes while sent data wait for an acknowledgement.
        # TCP_USER_TIMEOUT limits that wait.
        (socket.TCP_USER_TIMEOUT, max(int(1000 * seconds), 1)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def loopback() -> str:
    """Returns the loopback address of this host: IPv4 if usable, or else IPv6."""
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            listen(host).close()
            return host
    return "127.0.0.1"  # no loopback interface is up; later errors name this address


def of_interfaces(names: str = "") -> list[str]:
    """Returns the addresses of network interfaces, the loopback addresses last.

    Args:
        names: names of interfaces, separated by commas; pass "" for all interfaces.

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
    """Returns the addresses of each network interface that has addresses."""
    found: dict[str, list[str]] = {}
    for name, address in (*_ipv4_addresses(), *_ipv6_addresses()):
        found.setdefault(name, []).append(address)
    return found


def _ipv4_addresses() -> Sequence[tuple[str, str]]:
    found = []
    with (
        contextlib.suppress(OSError),  # the kernel may have no IPv4
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6_addresses() -> Sequence[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:  # the kernel has no IPv6
        return []
    # Leave out link-local addresses (scope 20), which are ambiguous without the index
    # of the interface.
    return [
        (row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])))
        for row in rows
        if row[3] != "20"
    ]
