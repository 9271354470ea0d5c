"""Calls between hosts before a job: who hears whom, how much, and what time it is.

Each host listens on a free port of every address, as ranks do, and answers those who
know the token of this survey; then each calls all others. Sends no user's data, and
what answers does nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringjax.control import addresses

CONNECT = 2.0  # seconds for an attempt, as a job has it
_ANSWER = 3.0  # seconds for an answer
_LARGE = 1 << 18  # bytes: many full packets in a row
_TIMES = 8  # questions for the time
_CLOCK = struct.Struct("!d")
_WHOLE, _TIME = b"L", b"T"


class Listener:
    """Answers on threads of its own, until the process ends."""

    def __init__(self, token: str, interfaces: str = "") -> None:
        self._token = token.encode()
        self.places: list[tuple[str, int]] = []
        for host in addresses.of_interfaces(interfaces):
            with contextlib.suppress(OSError):  # an address that is just going away
                sock = addresses.listen(host)
                self.places.append((host, sock.getsockname()[1]))
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            sock.settimeout(2 * _ANSWER)
            if not hmac.compare_digest(_exactly(sock, len(self._token)), self._token):
                return
            sock.sendall(b"!")
            while True:
                asked = _exactly(sock, 1)
                if asked == _WHOLE:
                    _exactly(sock, _LARGE)
                    sock.sendall(b"!")
                elif asked == _TIME:
                    sock.sendall(_CLOCK.pack(time.time()))


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes; EOFError if there are fewer."""
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def call(place: tuple[str, int], token: str) -> dict[str, Any]:
    """Calls a listener.

    Returns:
        `address`; `error`, empty if it has answered; and then `from`, our address;
        `large`, whether many full packets arrive; `offset`, what its clock is ahead,
        and `round_trip`, the shortest, both in seconds: the offset is that by half of
        the round trip, more or less.
    """
    found: dict[str, Any] = {"address": place[0], "error": ""}
    try:
        with addresses.connect(place, CONNECT) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_ANSWER)
            sock.sendall(token.encode())
            _exactly(sock, 1)
            found["from"] = sock.getsockname()[0]
            found |= _clock(sock)
            found["large"] = _passes_large(sock)
    except EOFError:
        found["error"] = "something else answers there"
    except OSError as error:
        found["error"] = error.strerror or str(error) or type(error).__name__
    return found


def _clock(sock: socket.socket) -> dict[str, float]:
    best = {"round_trip": float("inf")}
    for _ in range(_TIMES):
        sent = time.time()
        sock.sendall(_TIME)
        [there] = _CLOCK.unpack(_exactly(sock, _CLOCK.size))
        back = time.time()
        if back - sent < best["round_trip"]:
            offset = there - (sent + back) / 2
            best = {"round_trip": back - sent, "offset": offset}
    return best


def _passes_large(sock: socket.socket) -> bool:
    try:
        sock.sendall(_WHOLE + bytes(_LARGE))
        return _exactly(sock, 1) == b"!"
    except OSError:
        return False


def call_all(
    others: Mapping[str, Sequence[tuple[str, int]]], token: str
) -> dict[str, list[dict[str, Any]]]:
    """Calls every address of every other host, many at a time."""
    with ThreadPoolExecutor(32) as pool:
        running = {
            name: [pool.submit(call, (place[0], place[1]), token) for place in places]
            for name, places in others.items()
        }
        return {n: [f.result() for f in calls] for n, calls in running.items()}
