"""Addresses of hosts by name: all are looked up at the same time, each one once.

A name that only ssh knows costs some 20 s where no name server answers. Threads wait
for it, so that ringrun says what it waits for, and hears a Ctrl-C.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from ringjax import stderr

_AT_ONCE = 32  # threads
_SOON = 3.0  # seconds until it is said that the name server does not answer

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]


class _Lookup:
    """The addresses of one host, once the resolver has returned them."""

    def __init__(self) -> None:
        self.asked = time.monotonic()
        self.there = threading.Event()
        self.found: list[AddressInfo] = []


_answers: dict[str, _Lookup] = {}
_said: set[str] = set()


def ask(names: Iterable[str]) -> None:
    """Begins to look up those that are not known yet, and does not wait."""
    new = deque(name for name in dict.fromkeys(names) if name not in _answers)
    _answers.update((name, _Lookup()) for name in new)
    for _ in range(min(len(new), _AT_ONCE)):
        thread = threading.Thread(target=_look_up, args=(new,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: then in this one
            _look_up(new)


def _look_up(names: deque[str]) -> None:
    while names:
        with contextlib.suppress(IndexError):  # another thread was quicker
            name = names.popleft()
            answer = _answers[name]
            with contextlib.suppress(OSError, UnicodeError):
                answer.found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
            answer.there.set()


def addresses(name: str) -> list[AddressInfo]:
    """The datagram addresses of a host, as `socket.getaddrinfo`; none if unknown.

    Example:
        >>> addresses("127.0.0.1")[0][4]
        ('127.0.0.1', 9)
    """
    ask([name])
    answer = _answers[name]
    while not answer.there.wait(0.1):  # in pieces: signals are heard between them
        if time.monotonic() - answer.asked > _SOON and not _said:
            waiting = [n for n, one in _answers.items() if not one.there.is_set()]
            _said.update(waiting)
            stderr.line(
                "ringrun: waiting for the name server to answer for "
                + ", ".join(waiting[:8])
                + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else "")
            )
    return answer.found
