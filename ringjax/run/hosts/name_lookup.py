"""Looks up the addresses of host names in threads, and each name only once.

If no name server replies, the lookup of a name that only ssh can resolve takes about 20
s. While the threads wait, ringrun prints these names and reacts to Ctrl-C.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from ringjax import stderr

_MAX_THREADS = 32
_WARN_AFTER = 3.0  # seconds until the user reads which names have no reply

# `socket.getaddrinfo` returns family, kind, protocol, canonical name, socket address.
AddressInfo = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]
]


class _Lookup:
    """The lookup of one name. When `done` is set, `addresses` is complete."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.done = threading.Event()
        self.addresses: list[AddressInfo] = []


_lookups: dict[str, _Lookup] = {}
_announced: set[str] = set()


def start(names: Iterable[str]) -> None:
    """Starts looking up new names in threads, and does not wait for the results."""
    new = deque(name for name in dict.fromkeys(names) if name not in _lookups)
    _lookups.update((name, _Lookup()) for name in new)
    for _ in range(min(len(new), _MAX_THREADS)):
        thread = threading.Thread(target=_look_up, args=(new,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads, so use this thread
            _look_up(new)


def _look_up(names: deque[str]) -> None:
    while names:
        with contextlib.suppress(IndexError):  # another thread has taken the last name
            name = names.popleft()
            lookup = _lookups[name]
            with contextlib.suppress(OSError, UnicodeError):
                lookup.addresses = [
                    *socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
                ]
            lookup.done.set()


def addresses(name: str) -> list[AddressInfo]:
    """Returns the datagram addresses of a host, or [] if the name is unknown.

    Example:
        >>> addresses("127.0.0.1")[0][4]
        ('127.0.0.1', 9)
    """
    start([name])
    lookup = _lookups[name]
    # Wait repeatedly for a short time, because Python can run signal handlers only
    # between two waits.
    while not lookup.done.wait(0.1):
        if time.monotonic() - lookup.started_at > _WARN_AFTER and not _announced:
            waiting = [n for n, other in _lookups.items() if not other.done.is_set()]
            _announced.update(waiting)
            stderr.line(
                "ringrun: waiting for the name server to answer for "
                + ", ".join(waiting[:8])
                + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else "")
            )
    return lookup.addresses
