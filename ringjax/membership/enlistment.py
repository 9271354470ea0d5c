"""A worker's end of an elastic job: what it hears from the coordinator and tells it.

The other end is coordinator.py, the rules are in membership.py. A thread of its own
reads the connection and builds it up again when the coordinator was restarted, so that
training notices neither. Nothing here touches links or tensors.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ringjax import errors
from ringjax.control.handshake import Introduction, Purpose
from ringjax.control.session import GRACE, SERVER_RANK, Member
from ringjax.control.tls import offer
from ringjax.errors import PeerLost, Stalled, StartupError
from ringjax.membership import orders
from ringjax.membership.lifeline import Lifeline
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

__all__ = ["Dismissed", "Enlistment", "Fenced", "Line", "Member", "Members", "Notice"]
__all__ += ["Order", "Revoke", "Stopped", "Update", "Welcome", "join"]

# (returned, done, repeatable), see the rules of verdicts in verdicts.py.
Line = tuple[int, int, bool]
_LINGER = 5.0  # seconds to wait for a coordinator to hear that this worker has finished


def join(
    addresses: str,
    secret: bytes,
    job: str,
    worker: int,
    hello: dict[str, Any],
    timeout: float,
    *,
    elastic_timeout: float = 600.0,
    failure_timeout: float = 5.0,
    tls: str = "auto",
) -> Enlistment:
    """Joins the job and waits until it has started or this worker is welcomed.

    Args:
        addresses: of the coordinator: "host:port,...", tried in turn.
        worker: this worker's number.
        hello: what the others shall know.
        timeout: seconds for all of it.
        elastic_timeout: seconds to look for the coordinator after it was lost; then
            the order is `Stopped`.
        failure_timeout: seconds of silence on the wire until it counts as lost.
        tls: whether the connection is encrypted, as in RINGJAX_TLS.

    Returns:
        The enlistment; what it was told first is its `first`.

    Raises:
        StartupError: nobody answers, too few workers came, or this one is refused.
        AuthenticationError: the coordinator does not know the secret.
        Fenced: this worker has been declared lost.

    Example:
        >>> from ringjax.membership.coordinator import Coordinator
        >>> coordinator = Coordinator(bytes(32), "0123456789abcdef", np=1)
        >>> coordinator.start()
        >>> where = coordinator.addresses[0]
        >>> worker = join(where, bytes(32), "0123456789abcdef", 4, {"shm": True}, 9.0)
        >>> worker.epoch, worker.rank, worker.members[0].hello
        (0, 0, {'shm': True})
        >>> worker.close()
        >>> coordinator.close()
    """
    line = Lifeline(
        addresses,
        secret,
        Introduction(job, Purpose.RENDEZVOUS, worker, SERVER_RANK, tls=offer(tls)),
        server="coordinator",
        silence=failure_timeout,
        patience=elastic_timeout,
    )
    enlistment = Enlistment(worker, line, hello)
    try:
        enlistment.enter(time.monotonic() + timeout)
    except BaseException:
        enlistment.close()
        raise
    return enlistment


class Enlistment:
    """This worker's place in an elastic job. Made by `join`; usable from any thread.

    No method but `exchange`, `poll` and `close` waits. What a worker says is kept until
    the epoch changes, and said again to a coordinator that was started anew.

    Attributes:
        worker: this worker's number.
        members: the newest epoch's, by rank; empty before there is one.
        epoch, rank, size: of the newest `Members`; a newcomer's are provisional.
    """

    def __init__(self, worker: int, line: Lifeline, hello: dict[str, Any]) -> None:
        self.worker = worker
        self._first: Members | Welcome | Dismissed | None = None
        self.members: tuple[Member, ...] = ()
        self.epoch, self.rank, self.size = -1, -1, 0
        self._line, self._hello = line, hello
        self._changed = threading.Condition()
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
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def enter(self, deadline: float) -> None:
        """Reaches the coordinator and waits until it has said something; for `join`."""
        try:
            self._line.dial(deadline)
        except OSError as error:
            raise StartupError(
                f"worker {self.worker} could not join its job in time: {error}"
            ) from error
        self._line.start(self, self._changed)
        self._wait_for_first(deadline + GRACE)

    # --- what is heard ---

    @property
    def first(self) -> Members | Welcome | Dismissed:
        """What this worker was told first: it is a member, a newcomer, or not needed.

        `poll` returns only what came later.
        """
        assert self._first is not None
        return self._first

    def _wait_for_first(self, deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._first or self._end or self._refusal,
                max(deadline - time.monotonic(), 0.0),
            )
            if self._first is not None:
                return
            if isinstance(self._end, Fenced):
                lost = f"worker {self.worker} was declared lost"
                raise errors.Fenced(f"{lost}: {self._end.text}")
            why = self._refusal or (self._end and self._end.text)
            raise StartupError(why or f"worker {self.worker} was not welcomed in time")

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
        deadline = time.monotonic() + seconds + GRACE
        with self._exchanging, self._changed:
            mine = self.epoch if epoch is None else epoch
            self._check(mine, what)
            number, self._exchanges = self._exchanges, self._exchanges + 1
            # A rank that is one behind may still need the value before this one from a
            # coordinator that was started anew; more than one behind is none.
            self._standing.pop(("exchange", number - 2), None)
            message = {"type": "exchange", "epoch": mine, "number": number}
            message |= {"value": value, "seconds": seconds}
            self._say(("exchange", number), message, mine)
            while number not in self._replies:
                self._check(mine, what)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Stalled(f"{what}: no answer from the coordinator")
                self._changed.wait(left)
            reply = self._replies.pop(number)
        if reply["type"] == "broken":
            text = f"{what}: {reply.get('text')} (waited up to {seconds:g} s)"
            raise Stalled(text, reply.get("missing", ()))
        return list(reply["values"])

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

    # --- the connection, see lifeline.py ---

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
        elif kind == "gone" and message["epoch"] == self.epoch:
            rank = int(message["rank"])
            self._gone[rank] = str(message["text"])
            self._finished[str(rank)] = message["lines"]
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
            self._newest = message or {}
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
            if "leave" in self._standing and not self._closing:
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
