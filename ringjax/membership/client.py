"""A rank's end of its job's coordinator: what it hears from it and tells it.

The other end is coordinator.py, the rules are in membership.py. In an elastic job a
thread of its own reads the connection and builds it up again when the coordinator was
restarted, so that training notices neither. In other jobs there is no thread:
`exchange` and `gone` read, and losing the connection does not end a job that has come
together. Nothing here touches links or tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import gaierror
from typing import Any

from ringjax import errors
from ringjax.control.connecting import SERVER_RANK
from ringjax.control.handshake import Introduction, Purpose
from ringjax.control.member import Member
from ringjax.control.tls import offer
from ringjax.errors import AuthenticationError, PeerLost, Stalled, StartupError
from ringjax.membership import orders
from ringjax.membership.connection import PAUSE, Connection
from ringjax.membership.orders import (
    Dismissed,
    Fenced,
    Members,
    Notice,
    Order,
    Revoke,
    Stopped,
    Update,
    Welcome,
)

__all__ = [
    "CoordinatorClient",
    "Dismissed",
    "Fenced",
    "Line",
    "Member",
    "Members",
    "Notice",
]
__all__ += ["Order", "Revoke", "Stopped", "Ticket", "Update", "Welcome", "join"]

# (returned, done, repeatable), see the rules of verdicts in verdicts.py.
Line = tuple[int, int, bool]
GRACE = 2.0  # seconds to wait longer than the coordinator, which can say who is missing
_LINGER = 5.0  # seconds to wait for a coordinator to hear that this worker has finished


class Patience:
    """One line about a rank that waits for long, while its job comes together.

    Args:
        say: shows it.
        seconds: how long is long; 0: nothing is said.
        limit: when waiting ends.

    Example:
        >>> patience = Patience(print, 0.0, 120.0)
        >>> patience.nobody("no answer")
        >>> patience = Patience(print, 1e-9, 120.0)
        >>> patience.missing("ranks 1, 3 of 4")
        has waited 1e-09 s in init for ranks 1, 3 of 4; it waits up to 120 s
    """

    def __init__(
        self, say: Callable[[str], None], seconds: float, limit: float
    ) -> None:
        self._say, self._seconds, self._limit = say, seconds, limit
        self._due = time.monotonic() + seconds if seconds > 0 else math.inf

    @property
    def due(self) -> float:
        """When to say something; never, if that has been done."""
        return self._due

    def missing(self, whom: str) -> None:
        """These have not joined; "": somebody else says so."""
        if whom:
            self._tell(f"for {whom}")
        self._due = math.inf

    def nobody(self, why: str) -> None:
        """There is no coordinator yet; said if it is time."""
        if time.monotonic() >= self._due:
            self._tell(f"for the coordinator of its job ({why})")

    def _tell(self, what: str) -> None:
        self._due = math.inf
        up_to = f"it waits up to {self._limit:g} s"
        self._say(f"has waited {self._seconds:g} s in init {what}; {up_to}")


SILENT = Patience(lambda text: None, 0.0, 0.0)


@dataclass(frozen=True)
class Ticket:
    """How a rank reaches its coordinator; the addresses are "host:port,..."."""

    addresses: str
    secret: bytes = field(repr=False)
    job: str


def join(
    ticket: Ticket | Callable[[], Ticket],
    worker: int,
    hello: Mapping[str, Any] | Callable[[Ticket], Mapping[str, Any]],
    timeout: float,
    *,
    elastic_timeout: float = 0.0,
    failure_timeout: float = 5.0,
    patient: bool = False,
    hint: str = "",
    tls: str = "auto",
    patience: Patience = SILENT,
) -> CoordinatorClient:
    """Joins the job and waits until it has started or this worker is welcomed.

    Args:
        ticket: where the coordinator is; or finds that out before each attempt, and
            raises OSError as long as it is not known.
        worker: this worker's number; in a job that is not elastic its rank.
        hello: what the others shall know, if need be for a ticket.
        timeout: seconds for all of it.
        elastic_timeout: seconds to look for the coordinator after it was lost; then
            the order is `Stopped`. 0: the job is not elastic, and nobody looks.
        failure_timeout: in an elastic job, seconds of silence until it counts as lost.
        patient: a server that cannot prove itself may be a stranger on the port that
            the right one will take soon, so keep trying. Otherwise that is an error.
        hint: what may help if nobody is found, for the end of the error.
        tls: whether the connection is encrypted, as in RINGJAX_TLS.
        patience: speaks of a wait that is long.

    Returns:
        The client; what it was told first is its `first`.

    Raises:
        StartupError: nobody answers, too few workers came, or this one is refused.
        AuthenticationError: the coordinator does not know the secret.
        Fenced: this worker has been declared lost.

    Example:
        >>> from ringjax.membership.coordinator import Coordinator
        >>> coordinator = Coordinator(bytes(32), "0123456789abcdef", np=1)
        >>> coordinator.start()
        >>> ticket = Ticket(coordinator.addresses[0], bytes(32), "0123456789abcdef")
        >>> worker = join(ticket, 4, {"shm": True}, 9.0)
        >>> worker.epoch, worker.rank, worker.members[0].hello
        (0, 0, {'shm': True})
        >>> worker.close()
        >>> coordinator.close()
    """
    deadline, pause = time.monotonic() + timeout, 0.01
    silence = failure_timeout if elastic_timeout else 0.0
    while True:
        try:
            known = ticket() if callable(ticket) else ticket
            said = hello(known) if callable(hello) else hello
            who = Introduction(
                known.job, Purpose.RENDEZVOUS, worker, SERVER_RANK, tls=offer(tls)
            )
            client = CoordinatorClient(
                worker,
                Connection(
                    known.addresses, known.secret, who, silence, elastic_timeout
                ),
                dict(said),
            )
            client.enter(deadline, patience)
            return client
        except (OSError, AuthenticationError) as error:
            stranger = isinstance(error, AuthenticationError)
            if stranger and not patient:
                raise
            why = f"{error}{hint}"
            if patient and isinstance(error.__cause__, gaierror):
                why += "; set MASTER_ADDR to a name or address that this host knows"
            if time.monotonic() + pause >= deadline:
                kind = AuthenticationError if stranger else StartupError
                name, limit = _name(worker, elastic_timeout > 0), f"{timeout:g} s"
                text = f"{name} could not join its job within {limit}: {why}"
                raise kind(text) from error
            patience.nobody(why)
        time.sleep(pause)  # the coordinator cannot tell a rank when it will listen
        pause = min(1.5 * pause, PAUSE)


def _name(worker: int, elastic: bool) -> str:
    return f"{'worker' if elastic else 'rank'} {worker}"


class CoordinatorClient:
    """This worker's place in its job. Made by `join`; usable from any thread.

    No method but `exchange`, `poll` and `close` waits. What a worker says is kept until
    the epoch changes, and said again to a coordinator that was started anew.

    Attributes:
        worker: this worker's number.
        name: this worker in errors.
        members: the newest epoch's, by rank; empty before there is one.
        epoch, rank, size: of the newest `Members`; a newcomer's are provisional.
    """

    def __init__(
        self, worker: int, connection: Connection, hello: dict[str, Any]
    ) -> None:
        self.worker = worker
        self.name = _name(worker, connection.comes_back)
        self._first: Members | Welcome | Dismissed | None = None
        self.members: tuple[Member, ...] = ()
        self.epoch, self.rank, self.size = -1, -1, 0
        self._line, self._hello = connection, hello
        self._changed = threading.Condition()
        self._reading = threading.Lock()  # held while a caller reads the connection
        self._greeted = False  # the coordinator has answered on this connection
        self._closing = False
        self._farewell = False  # the coordinator knows that this worker has finished
        self._end: Dismissed | Fenced | Stopped | None = None
        self._refusal = ""
        self._term, self._newest = 0, dict[str, Any]()  # the last members message
        self._standing: dict[Hashable, dict[str, Any]] = {}
        self._orders: list[Order] = []
        self._revoked: Revoke | None = None
        self._gone: dict[int, str] = {}
        self._finished: dict[str, Any] = {}  # ranks that left -> their last lines
        self._exchanging, self._exchanges = threading.Lock(), 0
        self._replies: dict[int, dict[str, Any]] = {}
        self._missing: str | None = None  # ranks that have not come
        self._bell = -1  # readable while there are orders; in an elastic job

    def enter(self, deadline: float, patience: Patience) -> None:
        """Reaches the coordinator and waits until it has said something; for `join`."""
        try:
            where = self._line.open(self, self._changed, deadline)
            try:
                self._wait_for_first(deadline + GRACE, patience)
            except OSError as error:  # it ends, and perhaps another one begins
                raise OSError(f"{where}: {error}") from error
        except BaseException:
            self.close()
            raise
        if self._line.comes_back:
            heard = len(self._orders)  # already, behind the first
            self._bell = os.eventfd(heard, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._line.serve()

    # --- what is heard ---

    @property
    def first(self) -> Members | Welcome | Dismissed:
        """What this worker was told first: it is a member, a newcomer, or not needed.

        `poll` returns only what came later.
        """
        assert self._first is not None
        return self._first

    def _wait_for_first(self, deadline: float, patience: Patience) -> None:
        def heard() -> bool:
            return bool(self._first or self._end or self._refusal)

        self._read_until(heard, min(deadline, patience.due))
        if not heard() and patience.due < deadline:
            with self._changed:  # answered to the first who asks
                self._line.send({"type": "missing"})
            self._read_until(lambda: heard() or self._missing is not None, deadline)
            patience.missing(self._missing or "")
            self._read_until(heard, deadline)
        if self._first is not None:
            return
        if isinstance(self._end, Fenced):
            raise errors.Fenced(f"{self.name} was declared lost: {self._end.text}")
        why = self._refusal or (self._end and self._end.text)
        raise StartupError(why or f"{self.name} got no membership in time")

    def _read_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Hears messages on this thread; raises as `Connection.read`."""
        while not done() and self._line.read(deadline):
            pass

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to return."""
        return self._bell

    def poll(self, seconds: float = 0.0) -> list[Order]:
        """What was heard since the last call; waits up to `seconds` for the first."""
        with self._changed:
            if seconds > 0:
                self._changed.wait_for(lambda: self._orders or self._closing, seconds)
            found, self._orders = self._orders, []
            if self._bell >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
        return found

    def gone(self) -> dict[int, str]:
        """Ranks of the newest epoch that are lost or left, and why. Does not wait."""
        if not self._line.comes_back and self._reading.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, AuthenticationError):
                    self._read_until(lambda: False, 0.0)
            finally:
                self._reading.release()
        with self._changed:
            return dict(self._gone)

    # --- what is said ---

    def report(
        self,
        epoch: int,
        lines: Mapping[int, Line],
        sets: Mapping[int, Sequence[int]] | None = None,
        next_set: int = 0,
        *,
        restart: bool = False,
        text: str = "",
    ) -> None:
        """Says how far this worker's communicators came; `epoch` is over here.

        Args:
            epoch: the newest one of which `Members` came. Of communicators that were
                never installed in it the line is (0, 0, True), or there is none.
            lines: number of the communicator -> (returned, done, repeatable).
            sets: the process sets that this worker knows -> their ranks in `epoch`.
            next_set: the least number that no process set had here.
            restart: only a restart helps (device memory was lost).
            text: for the log.
        """
        message = orders.standing_of("report", epoch, sets, next_set)
        message["lines"] = {str(number): list(line) for number, line in lines.items()}
        self._say("report", message | {"restart": restart, "text": text}, epoch)

    def suspect(self, epoch: int, rank: int, text: str) -> None:
        """Accuses a rank of `epoch`: it is silent, or its links are broken."""
        message = {"type": "suspect", "epoch": epoch, "rank": rank, "text": text[:4096]}
        self._say(("suspect", rank), message, epoch)

    def ready(self) -> None:
        """A newcomer is warmed up and may become a member."""
        self._say("ready", {"type": "ready"})

    def pause(
        self,
        epoch: int,
        number: int,
        sets: Mapping[int, Sequence[int]] | None = None,
        next_set: int = 0,
    ) -> None:
        """This member stands at a step boundary and waits for the next epoch.

        All members say it for one `number`, or none. If `Members` of kind "repair"
        comes first, say it again with the new epoch.
        """
        message = orders.standing_of("pause", epoch, sets, next_set)
        self._say("pause", message | {"number": number}, epoch)

    def leaving(self) -> None:
        """This member wants to leave at the next pause."""
        self._say("leaving", {"type": "leaving"})

    def restart(self, epoch: int, text: str) -> None:
        """Has all members go back to their last commit.

        If `Members` of kind "repair" comes first, say it again with the new epoch.
        """
        message = {"type": "restart", "epoch": epoch, "text": text[:4096]}
        self._say("restart", message, epoch)

    def exchange(
        self, value: Any, seconds: float, what: str, epoch: int | None = None
    ) -> list[Any]:
        """Gives every rank the JSON values of all ranks, in the order of the ranks.

        All ranks of an epoch make the same exchanges in the same order.

        Args:
            what: names the exchange in errors.
            epoch: where the caller believes to be; the newest if it is None.

        Raises:
            PeerLost: that epoch is over.
            Stalled: not all ranks took part in time; the text names them.
        """
        with self._exchanging:
            with self._changed:
                mine = self.epoch if epoch is None else epoch
                self._check(mine, what)
                number, self._exchanges = self._exchanges, self._exchanges + 1
                # A rank that is one behind may still need the value before this one
                # from a coordinator that was started anew; more than one behind is
                # none.
                self._standing.pop(("exchange", number - 2), None)
                message = {"type": "exchange", "epoch": mine, "number": number}
                message |= {"value": value, "seconds": seconds}
                self._say(("exchange", number), message, mine)
            reply = self._await(number, seconds + GRACE, mine, what)
        if reply["type"] == "broken":
            text = f"{what}: {reply.get('text')} (waited up to {seconds:g} s)"
            raise Stalled(text, reply.get("missing", ()))
        return list(reply["values"])

    def _await(
        self, number: int, seconds: float, epoch: int, what: str
    ) -> dict[str, Any]:
        """The coordinator's answer to an exchange."""
        deadline = time.monotonic() + seconds
        if not self._line.comes_back:
            try:
                with self._reading:
                    self._read_until(lambda: number in self._replies, deadline)
            except OSError as error:
                with self._changed:
                    self.give_up(f"the coordinator is gone: {error}")
        with self._changed:
            while number not in self._replies:
                self._check(epoch, what)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Stalled(f"{what}: no answer from the coordinator")
                self._changed.wait(left)
            return self._replies.pop(number)

    def _check(self, epoch: int, what: str) -> None:
        """Raises if an epoch is over."""
        if self._end is not None:
            raise PeerLost(f"{what}: {self._end.text}")
        if self._closing:
            raise PeerLost(f"{what}: this worker has left the job")
        if epoch != self.epoch:
            raise PeerLost(f"{what}: epoch {epoch} is over, {self.epoch} has begun")
        if self._revoked is not None:
            lost = self._revoked.lost
            why = "; ".join(f"rank {rank} {text}" for rank, text in lost.items())
            raise PeerLost(
                f"{what}: epoch {epoch} is over: {why or 'a rank has stopped it'}",
                min(lost, default=-1),
            )

    def report_failure(self, text: str) -> None:
        """Tells the launcher why this worker goes down. Never raises or waits long."""
        self._say("failure", {"type": "failure", "text": text[:4096]})

    def leave(
        self, lines: Mapping[int, Line] | None = None, epoch: int | None = None
    ) -> None:
        """This member has finished: nobody is admitted to the job any more.

        Args:
            lines: as in `report`, so that ranks which are still inside the last call
                of a communicator know that it has finished here.
            epoch: the newest one that the program knows of, if `Members` of kind
                "restart" or "resize" came that it took no part in.
        """
        last = {str(number): list(line) for number, line in (lines or {}).items()}
        with self._changed:
            mine = self.epoch if epoch is None else epoch
            self._say("leave", {"type": "leave", "epoch": mine, "lines": last})

    def _say(
        self, key: Hashable, message: dict[str, Any], epoch: int | None = None
    ) -> None:
        """Sends a message now, and again to a coordinator that was started anew."""
        with self._changed:
            if epoch not in (None, self.epoch) or self._end or self._closing:
                return  # it is about something that is over
            self._standing.pop(key, None)
            self._standing[key] = message
            if self._greeted:
                self._line.send(message)

    # --- the connection, see connection.py ---

    def greeting(self) -> dict[str, Any]:
        """Hello, with what this worker knows from an earlier connection."""
        rejoin = None
        if self._first is not None:
            epoch = self.epoch if self._newest else -1
            rejoin = {"term": self._term, "epoch": epoch, "members": self._newest}
            rejoin["finished"] = self._finished
        hello = {"type": "hello", "worker": self.worker, "hello": self._hello}
        return hello | {"rejoin": rejoin}

    def cut(self) -> None:
        """Nothing can be said now."""
        self._greeted = False
        self._changed.notify_all()

    def give_up(self, text: str) -> None:
        """Without a coordinator this worker cannot go on."""
        self._order(Stopped(text))
        self._changed.notify_all()

    def finished(self) -> bool:
        """Whether this worker has no place in the job any more."""
        over = self._farewell or self._end is not None or bool(self._refusal)
        return over or self._closing

    def hear(self, message: dict[str, Any]) -> None:
        """Sorts a message: to whom it matters, and whether it must be kept."""
        kind = message.get("type")
        if kind in ("members", "welcome", "resumed"):
            self._term = int(message["term"])
        if kind == "farewell":
            self._farewell = True
        elif kind == "refused":
            self._refusal = str(message.get("text", "refused by the coordinator"))
        elif kind == "missing":
            self._missing = str(message["text"])
        elif kind == "gone" and message["epoch"] == self.epoch:
            for rank, text, lines in message["ranks"]:
                self._gone[int(rank)] = str(text)
                if lines is not None:
                    self._finished[str(rank)] = lines
        elif kind in ("values", "broken") and message.get("epoch") == self.epoch:
            self._replies[int(message["number"])] = message
        elif (order := orders.read(message, self.worker)) is not None:
            self._order(order, message)
        if kind in ("members", "welcome", "resumed") and not self._greeted:
            self._greeted = True
            for said in self._standing.values():
                self._line.send(said)
        self._changed.notify_all()

    def _order(self, order: Order, message: dict[str, Any] | None = None) -> None:
        if isinstance(order, Members):
            self._newest = (message or {}) if self._line.comes_back else {}
            self.members, self.epoch = order.members, order.epoch
            self.rank, self.size = order.rank, len(order.members)
            self._revoked, self._gone, self._exchanges = None, {}, 0
            self._finished = {}
            self._replies.clear()
            kept = ("leaving", "leave", "failure")
            self._standing = {k: m for k, m in self._standing.items() if k in kept}
        elif isinstance(order, Welcome):
            if self._first is not None:
                return  # from a coordinator that was started anew
            self.rank, self.size = order.rank, order.size
        elif isinstance(order, Revoke):
            self._revoked = order
            self._gone |= order.lost
        elif isinstance(order, Dismissed | Fenced | Stopped):
            self._end = order
        if self._first is None and isinstance(order, Members | Welcome | Dismissed):
            self._first = order
            return
        self._orders.append(order)
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    # --- the end ---

    def close(self) -> None:
        """Closes the connection once everything is said. May be called twice.

        After `leave` it waits until the coordinator knows, but not for long.
        """
        if not self._closing:
            self._line.drain(0.5)
        with self._changed:
            waits = "leave" in self._standing and self._line.comes_back
            if waits and not self._closing:
                self._changed.wait_for(lambda: self._farewell or self._end, _LINGER)
            self._closing = True
            self._changed.notify_all()
        self._line.close()
        with self._changed:  # whom it has woken may be reading the bell
            self._close_bell()

    def release(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        self._line.release()
        self._close_bell()

    def _close_bell(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
