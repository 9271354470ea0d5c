"""Where the ranks of a job find each other: a server, and the session of each rank.

The server gathers a hello from every rank, hands the membership to all, and afterwards
carries what is not data: reasons of failures, departures, small exchanges that all
ranks make in the same order. Ranks may leave and join again; each complete gathering is
an epoch. It is no key-value store, it relays no tensors, and it runs in ringrun or in
rank 0, in one thread. Every connection is authenticated first, see handshake.py.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import addresses as address
from .errors import AuthenticationError, StartupError
from .handshake import Door, Introduction, Keys, Opener, Purpose, Sealer, answer, turn
from .session import SERVER_RANK, Member, Session, join, ranks_text

__all__ = ["Failure", "Member", "Server", "Session", "join"]

_MOST_FROM_RANK = 1 << 20  # bytes of one message from a rank


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said before it went down; rank -1 is the server's own reason."""

    rank: int
    text: str


class _Seat:
    """The server's end of one rank's session."""

    def __init__(self, server: Server, sock: socket.socket, keys: Keys) -> None:
        self.server, self.sock = server, sock
        self.sealer, self.opener = (
            Sealer(keys.send),
            Opener(keys.receive, _MOST_FROM_RANK),
        )
        self.rank, self.seen, self.hello = -1, "", dict[str, Any]()
        self.output = bytearray()
        self.gathering: _Gathering | None = None
        self.ending = False  # close once the output is written

    def send(self, message: dict[str, Any], *, last: bool = False) -> None:
        self.output += self.sealer.seal(message)
        self.ending |= last
        self.write()

    def write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.output:
                del self.output[: self.sock.send(self.output[: 1 << 16])]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.output else 0)
        self.server.selector.modify(self.sock, wanted, self.turn)

    def turn(self, sock: socket.socket) -> None:
        """Reads and writes what is possible now."""
        try:
            if self.output:
                self.write()
            with contextlib.suppress(BlockingIOError):
                piece = sock.recv(1 << 16)
                if not piece:
                    raise ConnectionResetError("the connection was closed")
                for message in self.opener.feed(piece):
                    self.server.on_message(self, message)
        except (OSError, AuthenticationError) as error:
            self.server.drop(self, str(error))
            return
        if self.ending and not self.output:
            self.server.drop(self, "it was sent away")


@dataclass
class _Exchange:
    deadline: float
    values: dict[int, Any] = field(default_factory=dict)


class _Gathering:
    """The ranks that come together, and once they have: an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seats: dict[int, _Seat] = {}
        self.deadline = 0.0
        self.complete = False
        self.gone: dict[int, str] = {}
        self.exchanges: dict[int, _Exchange] = {}


class Server:
    """Gathers the ranks of one job.

    Args:
        secret: the job's secret.
        job: its id, 16 hexadecimal digits.
        size: how many ranks it has.
        hosts: the addresses to listen on.
        port: the same port on each of them; 0 takes a free one for each.
        start_timeout: seconds from the first rank's appearance to the last one's.
        log: takes sentences about refused connections.
    """

    def __init__(
        self,
        secret: bytes,
        job: str,
        size: int,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
        start_timeout: float = 120.0,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._size, self._start_timeout = size, start_timeout
        self.failures: list[Failure] = []  # what ranks reported, in order of arrival
        self._gathering = _Gathering(0)
        self._joined: set[int] = set()
        self._epochs: list[_Gathering] = []  # complete, and not yet left by all
        self._seats: set[_Seat] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        listeners: list[socket.socket] = []
        try:
            for host in hosts:
                listeners.append(address.listen(host, port))
        except OSError as error:
            for listener in listeners:
                listener.close()
            raise StartupError(
                f"cannot listen on {address.show(host, port)}: {error.strerror}"
            ) from error
        self.addresses = [address.show(*s.getsockname()[:2]) for s in listeners]
        self.selector = selectors.DefaultSelector()
        self._wakeup, woken = socket.socketpair()
        self._woken = woken
        self.selector.register(woken, selectors.EVENT_READ, lambda sock: sock.recv(64))
        self._door = Door(
            listeners,
            self.selector,
            lambda: answer(secret, job, self._accepts),
            self._admit,
            log or _print,
        )

    @property
    def joined(self) -> set[int]:
        """The ranks that have joined the present or the latest gathering."""
        return set(self._joined)

    def start(self) -> None:
        """Serves in a daemon thread until `close`."""
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes every connection. May be called twice."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the thread may have ended by itself
            self._wakeup.send(b"x")
        if self._thread is None:
            self.release()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _serve(self) -> None:
        try:
            while not self._closing:
                turn(self.selector, 0.25)
                self._door.sweep()
                self._sweep()
        finally:
            self.release()

    def release(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        self.selector.close()
        self._door.close()
        for sock in (*(seat.sock for seat in self._seats), self._wakeup, self._woken):
            sock.close()
        self._seats.clear()

    def _accepts(self, introduction: Introduction) -> str:
        if introduction.purpose != Purpose.RENDEZVOUS:
            return f"wants {introduction.purpose.name.lower()} from the rendezvous"
        if not 0 <= introduction.caller < self._size:
            return f"claims to be rank {introduction.caller} of {self._size}"
        return ""

    def _admit(
        self, sock: socket.socket, where: str, introduction: Introduction, keys: Keys
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seat = _Seat(self, sock, keys)
        seat.rank, seat.seen = introduction.caller, where
        self._seats.add(seat)
        self.selector.register(sock, selectors.EVENT_READ, seat.turn)

    def on_message(self, seat: _Seat, message: dict[str, Any]) -> None:
        """Serves one genuine message of a rank."""
        kind = message.get("type")
        if kind == "hello" and seat.gathering is None:
            self._hello(seat, message)
        elif kind == "failure":
            text = str(message.get("text", ""))
            self.failures.append(Failure(seat.rank, text))
            self._gone(seat, f"failed: {text}")
        elif kind == "leave":
            self._gone(seat, "left")
        elif kind == "exchange":
            self._exchange(seat, message)

    def _hello(self, seat: _Seat, message: dict[str, Any]) -> None:
        gathering = self._gathering
        present = gathering.seats.get(seat.rank)
        why = ""
        if message.get("size") != self._size:
            why = f"the job has {self._size} ranks, not {message.get('size')}"
        elif present is not None:
            why = f"rank {seat.rank} has joined already, from {present.seen}"
        if why:
            seat.send({"type": "refused", "text": why}, last=True)
            return
        if not gathering.seats:
            gathering.deadline = time.monotonic() + self._start_timeout
            self._joined = set()
        hello = message.get("hello")
        seat.hello = hello if isinstance(hello, dict) else {}
        seat.gathering = gathering
        gathering.seats[seat.rank] = seat
        self._joined.add(seat.rank)
        if len(gathering.seats) == self._size:
            self._complete(gathering)

    def _complete(self, gathering: _Gathering) -> None:
        gathering.complete = True
        self._epochs.append(gathering)
        self._gathering = _Gathering(gathering.epoch + 1)
        members = [
            {"rank": rank, "seen": seat.seen, "hello": seat.hello}
            for rank, seat in sorted(gathering.seats.items())
        ]
        self._tell(
            gathering, {"type": "members", "epoch": gathering.epoch, "members": members}
        )

    def _tell(self, gathering: _Gathering, message: dict[str, Any]) -> None:
        for seat in list(gathering.seats.values()):
            try:
                seat.send(message)
            except OSError as error:
                self.drop(seat, str(error))

    def _exchange(self, seat: _Seat, message: dict[str, Any]) -> None:
        number, gathering = message.get("number"), seat.gathering
        if gathering is None or not gathering.complete or not isinstance(number, int):
            return
        seconds = message.get("seconds")
        limit = float(seconds) if isinstance(seconds, int | float) else 0.0
        exchange = gathering.exchanges.setdefault(
            number, _Exchange(time.monotonic() + limit)
        )
        exchange.values[seat.rank] = message.get("value")
        if len(exchange.values) == self._size:
            values = [exchange.values[rank] for rank in range(self._size)]
            del gathering.exchanges[number]
            self._tell(
                gathering, {"type": "values", "number": number, "values": values}
            )
        elif gathering.gone:
            self._break_off(gathering, number, exchange)

    def _break_off(
        self, gathering: _Gathering, number: int, exchange: _Exchange
    ) -> None:
        """Tells the ranks that wait in an exchange why it will not be complete."""
        del gathering.exchanges[number]
        missing = [rank for rank in range(self._size) if rank not in exchange.values]
        why = [
            f"rank {rank} {gathering.gone[rank]}"
            for rank in missing
            if rank in gathering.gone
        ]
        text = "; ".join(why) or f"{ranks_text(missing)} did not take part"
        for rank in exchange.values:
            if (seat := gathering.seats.get(rank)) is not None:
                with contextlib.suppress(OSError):  # its own turn will find that out
                    seat.send({"type": "broken", "number": number, "text": text})

    def _gone(self, seat: _Seat, why: str) -> None:
        """A rank is no longer there; the first reason counts."""
        gathering = seat.gathering
        if gathering is None or seat.rank in gathering.gone:
            return
        if not gathering.complete:
            if gathering.seats.pop(seat.rank, None) is not None:
                self._joined.discard(seat.rank)
            return
        gathering.gone[seat.rank] = why
        self._tell(gathering, {"type": "gone", "rank": seat.rank, "text": why})
        for number, exchange in list(gathering.exchanges.items()):
            if number in gathering.exchanges and seat.rank not in exchange.values:
                self._break_off(gathering, number, exchange)

    def drop(self, seat: _Seat, why: str) -> None:
        """Forgets a rank's connection."""
        if seat not in self._seats:
            return
        self._seats.discard(seat)
        self.selector.unregister(seat.sock)
        seat.sock.close()
        if (gathering := seat.gathering) is not None:
            self._gone(seat, f"lost its connection to the rendezvous ({why})")
            gathering.seats.pop(seat.rank, None)
            if gathering.complete and not gathering.seats:
                self._epochs.remove(gathering)

    def _sweep(self) -> None:
        now = time.monotonic()
        for gathering in self._epochs:
            for number, exchange in list(gathering.exchanges.items()):
                if exchange.deadline <= now:
                    self._break_off(gathering, number, exchange)
        waiting = self._gathering
        if not waiting.seats or waiting.deadline > now:
            return
        missing = [rank for rank in range(self._size) if rank not in waiting.seats]
        text = (
            f"{ranks_text(missing)} of {self._size} did not join within "
            f"{self._start_timeout:g} s"
        )
        self.failures.append(Failure(SERVER_RANK, text))
        self._gathering = _Gathering(waiting.epoch)
        for seat in list(waiting.seats.values()):
            seat.gathering = None
            with contextlib.suppress(OSError):
                seat.send({"type": "refused", "text": text}, last=True)


def _print(text: str) -> None:
    print(f"[ringjax rendezvous] {text}", file=sys.stderr, flush=True)
