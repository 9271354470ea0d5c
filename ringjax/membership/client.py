"""A rank's end of its job's coordinator: what it hears from it and tells it.

The other end is coordinator.py, the rules are in membership.py. In an elastic job a
thread of its own reads the connection and builds it up again when the coordinator was
restarted, so that training notices neither. In other jobs there is no thread:
`exchange` and `gone` read, and losing the connection does not end a job that has come
together. Nothing here touches links or tensors.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ringjax import errors
from ringjax.control.member import Member
from ringjax.errors import AuthenticationError, PeerLost, Stalled, StartupError
from ringjax.membership import directives
from ringjax.membership.connection import Connection
from ringjax.membership.directives import (
    Directive,
    Dismiss,
    EpochDirective,
    Fence,
    Revoke,
    Stop,
    Welcome,
)
from ringjax.membership.init_warning import InitWarning

# (returned, done, repeatable), see the rules of verdicts in commit_decision.py.
CallProgress = tuple[int, int, bool]
GRACE = 2.0  # seconds to wait longer than the coordinator, which can say who is missing
_LEAVE_TIMEOUT = (
    5.0  # seconds to wait for a coordinator to hear that this worker has finished
)


def worker_text(worker: int, *, elastic: bool) -> str:
    return f"{'worker' if elastic else 'rank'} {worker}"


class CoordinatorClient:
    """This worker's place in its job. Made by `join`; usable from any thread.

    No method but `exchange`, `poll` and `close` waits. What a worker says is kept until
    the epoch changes, and said again to a coordinator that was started anew.

    Attributes:
        worker: this worker's number.
        name: this worker in errors.
        members: the newest epoch's, by rank; empty before there is one.
        epoch, rank, size: of the newest `EpochDirective`; a newcomer's are provisional.
    """

    def __init__(
        self, worker: int, connection: Connection, hello: dict[str, Any]
    ) -> None:
        self.worker = worker
        self.name = worker_text(worker, elastic=connection.reconnects)
        self._first: EpochDirective | Welcome | Dismiss | None = None
        self.members: tuple[Member, ...] = ()
        self.epoch, self.rank, self.size = -1, -1, 0
        self._connection, self._hello = connection, hello
        self._changed = threading.Condition()
        self._reading = threading.Lock()  # held while a caller reads the connection
        self._greeted = False  # the coordinator has answered on this connection
        self._closing = False
        self._leave_acknowledged = (
            False  # the coordinator knows that this worker has finished
        )
        self._end: Dismiss | Fence | Stop | None = None
        self._refusal = ""
        self._term, self._newest = 0, dict[str, Any]()  # the last members message
        self._resendable: dict[Hashable, dict[str, Any]] = {}
        self._directives: list[Directive] = []
        self._revoked: Revoke | None = None
        self._departed: dict[int, str] = {}
        self._finished: dict[str, Any] = {}  # ranks that left -> their last lines
        self._exchanging, self._exchanges = threading.Lock(), 0
        self._replies: dict[int, dict[str, Any]] = {}
        self._missing: str | None = None  # ranks that have not come
        self._wakeup_fd = -1  # readable while there are orders; in an elastic job

    def enter(self, deadline: float, warning: InitWarning) -> None:
        """Reaches the coordinator and waits until it has said something; for `join`."""
        try:
            where = self._connection.open(self, self._changed, deadline)
            try:
                self._wait_for_first(deadline + GRACE, warning)
            except OSError as error:  # it ends, and perhaps another one begins
                raise OSError(f"{where}: {error}") from error
        except BaseException:
            self.close()
            raise
        if self._connection.reconnects:
            heard = len(self._directives)  # already, behind the first
            self._wakeup_fd = os.eventfd(heard, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._connection.start_thread()

    # --- what is heard ---

    @property
    def first(self) -> EpochDirective | Welcome | Dismiss:
        """What this worker was told first: it is a member, a newcomer, or not needed.

        `poll` returns only what came later.
        """
        assert self._first is not None
        return self._first

    def _wait_for_first(self, deadline: float, warning: InitWarning) -> None:
        def answered() -> bool:
            return bool(self._first or self._end or self._refusal)

        self._read_until(answered, min(deadline, warning.due))
        if not answered() and warning.due < deadline:
            with self._changed:  # answered to the first who asks
                self._connection.send({"type": "missing"})
            self._read_until(lambda: answered() or self._missing is not None, deadline)
            warning.missing_ranks(self._missing or "")
            self._read_until(answered, deadline)
        if self._first is not None:
            return
        if isinstance(self._end, Fence):
            raise errors.Fenced(f"{self.name} was declared lost: {self._end.text}")
        why = self._refusal or (self._end and self._end.text)
        raise StartupError(why or f"{self.name} got no membership in time")

    def _read_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Hears messages on this thread; raises as `Connection.read`."""
        while not done() and self._connection.read(deadline):
            pass

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to return."""
        return self._wakeup_fd

    def poll(self, seconds: float = 0.0) -> list[Directive]:
        """What was heard since the last call; waits up to `seconds` for the first."""
        with self._changed:
            if seconds > 0:
                self._changed.wait_for(
                    lambda: self._directives or self._closing, seconds
                )
            found, self._directives = self._directives, []
            if self._wakeup_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup_fd)
        return found

    def departed_ranks(self) -> dict[int, str]:
        """Ranks of the newest epoch that are lost or left, and why. Does not wait."""
        if not self._connection.reconnects and self._reading.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, AuthenticationError):
                    self._read_until(lambda: False, 0.0)
            finally:
                self._reading.release()
        with self._changed:
            return dict(self._departed)

    # --- what is said ---

    def report(
        self,
        epoch: int,
        lines: Mapping[int, CallProgress],
        sets: Mapping[int, Sequence[int]] | None = None,
        next_set: int = 0,
        *,
        restart: bool = False,
        text: str = "",
    ) -> None:
        """Says how far this worker's communicators came; `epoch` is over here.

        Args:
            epoch: the newest that an `EpochDirective` announced. For a communicator
                that was never installed in it the entry is (0, 0, True) or missing.
            lines: number of the communicator -> (returned, done, repeatable).
            sets: the process sets that this worker knows -> their ranks in `epoch`.
            next_set: the least number that no process set had here.
            restart: only a restart helps (device memory was lost).
            text: for the log.
        """
        message = directives.progress_message("report", epoch, sets, next_set)
        message["lines"] = {str(number): list(line) for number, line in lines.items()}
        self._send("report", message | {"restart": restart, "text": text}, epoch)

    def suspect(self, epoch: int, rank: int, text: str) -> None:
        """Accuses a rank of `epoch`: it is silent, or its links are broken."""
        message = {"type": "suspect", "epoch": epoch, "rank": rank, "text": text[:4096]}
        self._send(("suspect", rank), message, epoch)

    def ready(self) -> None:
        """A newcomer is warmed up and may become a member."""
        self._send("ready", {"type": "ready"})

    def pause(
        self,
        epoch: int,
        number: int,
        sets: Mapping[int, Sequence[int]] | None = None,
        next_set: int = 0,
    ) -> None:
        """This member stands at a step boundary and waits for the next epoch.

        All members say it for one `number`, or none. If an `EpochDirective` of kind
        "repair" comes first, say it again with the new epoch.
        """
        message = directives.progress_message("pause", epoch, sets, next_set)
        self._send("pause", message | {"number": number}, epoch)

    def request_leave(self) -> None:
        """This member wants to leave at the next pause."""
        self._send("leaving", {"type": "leaving"})

    def restart(self, epoch: int, text: str) -> None:
        """Has all members go back to their last commit.

        If an `EpochDirective` of kind "repair" comes first, call it again with the new
        epoch.
        """
        message = {"type": "restart", "epoch": epoch, "text": text[:4096]}
        self._send("restart", message, epoch)

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
                self._check_epoch(mine, what)
                number, self._exchanges = self._exchanges, self._exchanges + 1
                # A rank that is one behind may still need the value before this one
                # from a coordinator that was started anew; more than one behind is
                # none.
                self._resendable.pop(("exchange", number - 2), None)
                message = {"type": "exchange", "epoch": mine, "number": number}
                message |= {"value": value, "seconds": seconds}
                self._send(("exchange", number), message, mine)
            reply = self._await_reply(number, seconds + GRACE, mine, what)
        if reply["type"] == "broken":
            text = f"{what}: {reply.get('text')} (waited up to {seconds:g} s)"
            raise Stalled(text, reply.get("missing", ()))
        return list(reply["values"])

    def _await_reply(
        self, number: int, seconds: float, epoch: int, what: str
    ) -> dict[str, Any]:
        """The coordinator's answer to an exchange."""
        deadline = time.monotonic() + seconds
        if not self._connection.reconnects:
            try:
                with self._reading:
                    self._read_until(lambda: number in self._replies, deadline)
            except OSError as error:
                with self._changed:
                    self.give_up(f"the coordinator is gone: {error}")
        with self._changed:
            while number not in self._replies:
                self._check_epoch(epoch, what)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Stalled(f"{what}: no answer from the coordinator")
                self._changed.wait(left)
            return self._replies.pop(number)

    def _check_epoch(self, epoch: int, what: str) -> None:
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
        self._send("failure", {"type": "failure", "text": text[:4096]})

    def leave(
        self, lines: Mapping[int, CallProgress] | None = None, epoch: int | None = None
    ) -> None:
        """This member has finished: nobody is admitted to the job any more.

        Args:
            lines: as in `report`, so that ranks which are still inside the last call
                of a communicator know that it has finished here.
            epoch: the newest one that the program knows of, if `EpochDirective` of kind
                "restart" or "resize" came that it took no part in.
        """
        last = {str(number): list(line) for number, line in (lines or {}).items()}
        with self._changed:
            mine = self.epoch if epoch is None else epoch
            self._send("leave", {"type": "leave", "epoch": mine, "lines": last})

    def _send(
        self, key: Hashable, message: dict[str, Any], epoch: int | None = None
    ) -> None:
        """Sends a message now, and again to a coordinator that was started anew."""
        with self._changed:
            if epoch not in (None, self.epoch) or self._end or self._closing:
                return  # it is about something that is over
            self._resendable.pop(key, None)
            self._resendable[key] = message
            if self._greeted:
                self._connection.send(message)

    # --- the connection, see connection.py ---

    def hello_message(self) -> dict[str, Any]:
        """Hello, with what this worker knows from an earlier connection."""
        rejoin = None
        if self._first is not None:
            epoch = self.epoch if self._newest else -1
            rejoin = {"term": self._term, "epoch": epoch, "members": self._newest}
            rejoin["finished"] = self._finished
        hello = {"type": "hello", "worker": self.worker, "hello": self._hello}
        return hello | {"rejoin": rejoin}

    def on_disconnected(self) -> None:
        """Nothing can be said now."""
        self._greeted = False
        self._changed.notify_all()

    def give_up(self, text: str) -> None:
        """Without a coordinator this worker cannot go on."""
        self._on_directive(Stop(text))
        self._changed.notify_all()

    def is_finished(self) -> bool:
        """Whether this worker has no place in the job any more."""
        over = self._leave_acknowledged or self._end is not None or bool(self._refusal)
        return over or self._closing

    def on_message(self, message: dict[str, Any]) -> None:
        """Sorts a message: to whom it matters, and whether it must be kept."""
        kind = message.get("type")
        if kind in ("members", "welcome", "resumed"):
            self._term = int(message["term"])
        if kind == "farewell":
            self._leave_acknowledged = True
        elif kind == "refused":
            self._refusal = str(message.get("text", "refused by the coordinator"))
        elif kind == "missing":
            self._missing = str(message["text"])
        elif kind == "gone" and message["epoch"] == self.epoch:
            for rank, text, lines in message["ranks"]:
                self._departed[int(rank)] = str(text)
                if lines is not None:
                    self._finished[str(rank)] = lines
        elif kind in ("values", "broken") and message.get("epoch") == self.epoch:
            self._replies[int(message["number"])] = message
        elif (order := directives.parse(message, self.worker)) is not None:
            self._on_directive(order, message)
        if kind in ("members", "welcome", "resumed") and not self._greeted:
            self._greeted = True
            for said in self._resendable.values():
                self._connection.send(said)
        self._changed.notify_all()

    def _on_directive(
        self, order: Directive, message: dict[str, Any] | None = None
    ) -> None:
        if isinstance(order, EpochDirective):
            self._newest = (message or {}) if self._connection.reconnects else {}
            self.members, self.epoch = order.members, order.epoch
            self.rank, self.size = order.rank, len(order.members)
            self._revoked, self._departed, self._exchanges = None, {}, 0
            self._finished = {}
            self._replies.clear()
            kept = ("leaving", "leave", "failure")
            self._resendable = {k: m for k, m in self._resendable.items() if k in kept}
        elif isinstance(order, Welcome):
            if self._first is not None:
                return  # from a coordinator that was started anew
            self.rank, self.size = order.rank, order.size
        elif isinstance(order, Revoke):
            self._revoked = order
            self._departed |= order.lost
        elif isinstance(order, Dismiss | Fence | Stop):
            self._end = order
        if self._first is None and isinstance(
            order, EpochDirective | Welcome | Dismiss
        ):
            self._first = order
            return
        self._directives.append(order)
        if self._wakeup_fd >= 0:
            os.eventfd_write(self._wakeup_fd, 1)

    # --- the end ---

    def close(self) -> None:
        """Closes the connection once everything is said. May be called twice.

        After `leave` it waits until the coordinator knows, but not for long.
        """
        if not self._closing:
            self._connection.drain(0.5)
        with self._changed:
            waits = "leave" in self._resendable and self._connection.reconnects
            if waits and not self._closing:
                self._changed.wait_for(
                    lambda: self._leave_acknowledged or self._end, _LEAVE_TIMEOUT
                )
            self._closing = True
            self._changed.notify_all()
        self._connection.close()
        with self._changed:  # whom it has woken may be reading the bell
            self._close_wakeup_fd()

    def close_in_child(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        self._connection.close_in_child()
        self._close_wakeup_fd()

    def _close_wakeup_fd(self) -> None:
        bell, self._wakeup_fd = self._wakeup_fd, -1
        if bell >= 0:
            os.close(bell)
