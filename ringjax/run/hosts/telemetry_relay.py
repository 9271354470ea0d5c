"""The ranks of this host that tell how they are, each over a socket of its own.

The agent listens on an abstract unix socket, whose name its ranks find in their
environment; the kernel says whether who connects is of this user. Lines are handed on
to ringrun as they are, or dropped if ringrun does not take them: nobody ever waits for
anybody here. What they mean is in ringjax.monitor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from ringjax.control.unix_peer import peer_uid
from ringjax.run.hosts.channel import Message

_LONGEST = 1 << 18  # bytes of a line
_CHUNK = 1 << 16
_STRANGERS = 64  # connections of those that have not said yet who they are
_SILENCE = 5.0  # seconds to say that


@dataclass(slots=True, eq=False)
class _RankConnection:
    """A connection; `name` is the rank's number for ringrun, once it has told it."""

    sock: socket.socket
    came: float
    name: int | None = None
    input: bytes = b""


class TelemetryRelay:
    """Takes ranks in and hands on what they tell.

    Args:
        names: of the ranks that run here.
        hand_on: takes a message for ringrun, or drops it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        names: Container[int],
        hand_on: Callable[[Message], None],
    ) -> None:
        self._selector, self._names, self._hand_on = selector, names, hand_on
        self._listener: socket.socket | None = None
        self._known: list[_RankConnection] = []
        self._every = 0.0
        self.address = ""

    def open(self) -> str:
        """The name of the socket; empty: there is none. Listens from the first call."""
        if self._listener is None:
            name = f"ringjax-agent-{secrets.token_hex(8)}"
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(f"\0{name}")
                listener.listen(_STRANGERS)
            except OSError:  # the job does without
                listener.close()
                return ""
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._listener, self.address = listener, name
        return self.address

    def ask(self, every: float) -> None:
        """All ranks, and those that come, tell each so many seconds; 0: no more."""
        self._every = every
        for teller in [each for each in self._known if each.name is not None]:
            self._ask(teller)

    def _ask(self, teller: _RankConnection) -> None:
        try:
            teller.sock.send(f"{self._every:g}\n".encode())
        except BlockingIOError:  # it does not read, so it does not tell
            pass
        except OSError:
            self._forget(teller)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) != os.geteuid():
                sock.close()
                return
            sock.setblocking(False)
            if len(strangers := self._strangers()) >= _STRANGERS:
                self._forget(strangers[0])
            teller = _RankConnection(sock, time.monotonic())
            self._known.append(teller)
            self._selector.register(
                sock, selectors.EVENT_READ, lambda: self._read(teller)
            )

    def _strangers(self) -> list[_RankConnection]:
        return [teller for teller in self._known if teller.name is None]

    def timeout(self) -> float | None:
        """Seconds until `sweep` has something to do; None: nothing."""
        came = [teller.came for teller in self._strangers()]
        return max(0.0, min(came) + _SILENCE - time.monotonic()) if came else None

    def sweep(self) -> None:
        """Those that do not say who they are are not kept."""
        for teller in self._strangers():
            if time.monotonic() - teller.came >= _SILENCE:
                self._forget(teller)

    def _read(self, teller: _RankConnection) -> None:
        try:
            data = teller.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, teller.input = (teller.input + data).split(b"\n")
        if not data or len(teller.input) > _LONGEST:
            self._forget(teller)
            return
        for line in lines:
            if teller.name is None:
                teller.name = self._introduced(line)
                if teller.name is None:
                    self._forget(teller)
                    return
                if self._every:
                    self._ask(teller)
            elif self._every:
                text = line.decode(errors="replace")
                self._hand_on({"is": "told", "id": teller.name, "text": text})

    def _introduced(self, line: bytes) -> int | None:
        """A rank of this host, by what it says first."""
        number = line.removeprefix(b'{"id":').removesuffix(b"}")
        name = int(number) if number.isdigit() and len(number) < 11 else -1
        return name if name >= 0 and name in self._names else None

    def _forget(self, teller: _RankConnection) -> None:
        if teller in self._known:
            self._known.remove(teller)
            self._selector.unregister(teller.sock)
            teller.sock.close()
