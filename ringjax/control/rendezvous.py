"""Where the ranks of a job find each other: a server, and the session of each rank.

The server gathers a hello from every rank, hands the membership to all, and afterwards
carries what is not data: reasons of failures, departures, small exchanges that all
ranks make in the same order. Ranks may leave and join again; each complete gathering is
an epoch. It is no key-value store, it relays no tensors, and it runs in ringrun or in
rank 0, in one thread. Every connection is authenticated first, see handshake.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.control import open_files
from ringjax.control.exchanges import Exchanges, Replies
from ringjax.control.sealing import encode
from ringjax.control.server import Seat, Service
from ringjax.control.session import SERVER_RANK, Member, Session, join, ranks_text

# Seconds between two messages about ranks that have gone: all that went meanwhile are
# in one. When a job ends all go at about the same time, and all are to be told of all.
_PAUSE = 0.05

__all__ = ["Failure", "Member", "Server", "Session", "join"]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said before it went down; rank -1 is the server's own reason."""

    rank: int
    text: str


class _Gathering:
    """The ranks that come together, and once they have: an epoch."""

    def __init__(self, epoch: int, size: int) -> None:
        self.epoch = epoch
        self.seats: dict[int, Seat] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        self.deadline = 0.0
        self.complete = False
        self.asked = False  # who is missing
        self.gone: dict[int, str] = {}
        self.untold: list[tuple[int, str]] = []  # of these, what the others do not know
        self.told = 0.0  # when they were told something last
        self.exchanges = Exchanges(size)


class Server(Service):
    """Gathers the ranks of one job.

    Args:
        secret: the job's secret.
        job: its id, 16 hexadecimal digits.
        size: how many ranks it has.
        hosts: the addresses to listen on; None: this machine's loopback alone.
        port: the same port on each of them; 0 takes a free one for each.
        start_timeout: seconds from the first rank's appearance to the last one's.
        log: takes sentences about refused connections.
        tls: whether sessions are encrypted, as in RINGJAX_TLS.
    """

    name = "rendezvous"

    def __init__(
        self,
        secret: bytes,
        job: str,
        size: int,
        *,
        hosts: Sequence[str] | None = None,
        port: int = 0,
        start_timeout: float = 120.0,
        log: Callable[[str], None] | None = None,
        tls: str = "auto",
    ) -> None:
        self._size, self._start_timeout = size, start_timeout
        self.failures: list[Failure] = []  # what ranks reported, in order of arrival
        self._gathering = _Gathering(0, size)
        self._joined: set[int] = set()
        self._places: dict[Seat, _Gathering] = {}  # of those who said hello
        self._epochs: list[_Gathering] = []  # complete, and not yet left by all
        open_files.require(size, "the rendezvous")
        # A door gives a fourth of them to callers who have not proved themselves.
        open_files.allow(4 * size)
        super().__init__(secret, job, hosts=hosts, port=port, log=log, tls=tls)

    @property
    def joined(self) -> set[int]:
        """The ranks that have joined the present or the latest gathering."""
        return set(self._joined)

    def refuses(self, caller: int) -> str:
        """Numbers that are no rank."""
        if not 0 <= caller < self._size:
            return f"claims to be rank {caller} of {self._size}"
        return ""

    def on_message(self, seat: Seat, message: dict[str, Any]) -> None:
        """Serves one genuine message of a rank."""
        kind, gathering = message.get("type"), self._places.get(seat)
        if kind == "hello" and gathering is None:
            self._hello(seat, message)
        elif kind == "failure":
            text = str(message.get("text", ""))
            self.failures.append(Failure(seat.caller, text))
            self._gone(seat, f"failed: {text}")
        elif kind == "leave":
            self._gone(seat, "left")
        elif kind == "missing" and gathering is not None:
            self._missing(seat, gathering)
        elif kind == "exchange" and gathering is not None and gathering.complete:
            now = time.monotonic()
            self._reply(gathering, gathering.exchanges.put(seat.caller, message, now))

    def _hello(self, seat: Seat, message: dict[str, Any]) -> None:
        gathering, rank = self._gathering, seat.caller
        present = gathering.seats.get(rank)
        why = ""
        if message.get("size") != self._size:
            why = f"the job has {self._size} ranks, not {message.get('size')}"
        elif present is not None:
            why = f"rank {rank} has joined already, from {present.seen}"
        if why:
            self.send(seat, {"type": "refused", "text": why}, last=True)
            return
        if not gathering.seats:
            gathering.deadline = time.monotonic() + self._start_timeout
            self._joined = set()
        hello = message.get("hello")
        gathering.hellos[rank] = hello if isinstance(hello, dict) else {}
        self._places[seat] = gathering
        gathering.seats[rank] = seat
        self._joined.add(rank)
        if len(gathering.seats) == self._size:
            self._complete(gathering)

    def _missing(self, seat: Seat, gathering: _Gathering) -> None:
        """Somebody has waited for long; only the first is told, and tells people."""
        if not gathering.complete and not gathering.asked:
            gathering.asked = True
            self.send(seat, {"type": "missing", "ranks": self._absent(gathering)})

    def _absent(self, gathering: _Gathering) -> list[int]:
        return [rank for rank in range(self._size) if rank not in gathering.seats]

    def _complete(self, gathering: _Gathering) -> None:
        gathering.complete = True
        self._epochs.append(gathering)
        self._gathering = _Gathering(gathering.epoch + 1, self._size)
        members = [
            {"rank": rank, "seen": seat.seen, "hello": gathering.hellos[rank]}
            for rank, seat in sorted(gathering.seats.items())
        ]
        self._tell(
            gathering, {"type": "members", "epoch": gathering.epoch, "members": members}
        )

    def _tell(self, gathering: _Gathering, message: dict[str, Any]) -> None:
        there = [rank for rank in gathering.seats if rank not in gathering.gone]
        self._reply(gathering, [(there, message)])

    def _reply(self, gathering: _Gathering, replies: Replies) -> None:
        for ranks, message in replies:
            text = encode(message)
            for rank in ranks:
                if (seat := gathering.seats.get(rank)) is not None:
                    self.send(seat, text)

    def _gone(self, seat: Seat, why: str) -> None:
        """A rank is no longer there; the first reason counts."""
        gathering, rank = self._places.get(seat), seat.caller
        if gathering is None or rank in gathering.gone:
            return
        if not gathering.complete:
            if gathering.seats.pop(rank, None) is not None:
                self._joined.discard(rank)
            return
        gathering.gone[rank] = why
        gathering.untold.append((rank, why))
        self._reply(gathering, gathering.exchanges.gone(rank, why))

    def on_lost(self, seat: Seat, why: str) -> None:
        """Forgets a rank's connection."""
        if seat in self._places:
            self._gone(seat, f"lost its connection to the rendezvous ({why})")
            gathering = self._places.pop(seat)
            gathering.seats.pop(seat.caller, None)
            if gathering.complete and not gathering.seats:
                self._epochs.remove(gathering)

    def rest(self) -> float:
        """Less, while there is something to tell."""
        return _PAUSE if any(g.untold for g in self._epochs) else super().rest()

    def on_turn(self) -> None:
        """Ends what takes too long."""
        now = time.monotonic()
        for gathering in list(self._epochs):
            self._reply(gathering, gathering.exchanges.sweep(now))
            if gathering.untold and now >= gathering.told + _PAUSE:
                gathering.told, gone = now, gathering.untold
                gathering.untold = []
                self._tell(gathering, {"type": "gone", "ranks": gone})
        waiting = self._gathering
        if not waiting.seats or waiting.deadline > now:
            return
        text = (
            f"{ranks_text(self._absent(waiting))} of {self._size} did not join within "
            f"{self._start_timeout:g} s"
        )
        self.failures.append(Failure(SERVER_RANK, text))
        self._gathering = _Gathering(waiting.epoch, self._size)
        for seat in list(waiting.seats.values()):
            del self._places[seat]
            self.send(seat, {"type": "refused", "text": text}, last=True)
