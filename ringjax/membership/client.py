"""The worker's end of its connection to the coordinator.

The client receives directives and sends reports and requests. In an elastic job a
thread reads the connection and reconnects after the coordinator was restarted, without
an effect on training. In other jobs there is no thread: `exchange` and `departed_ranks`
read the connection, and the job continues if the connection is lost after the start.
The client touches neither links nor tensors.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ringjax.control.member import JsonObject, Member
from ringjax.control.number_lists import compress
from ringjax.control.worker_address import WorkerAddress
from ringjax.errors import AuthenticationError, Fenced, PeerLost, Stalled, StartupError
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

# The tuple (returned, done, repeatable) of a communicator, see `CommitReport.lines`.
CallProgress = tuple[int, int, bool]
# Seconds that a client waits longer than the coordinator, whose reply names the missing
# ranks.
GRACE = 2.0
# The requests to which the coordinator sends these replies.
_REPLIES = {"values": "exchange", "broken": "exchange", "located": "locate"}
_LEAVE_TIMEOUT = 5.0  # seconds to wait until the coordinator acknowledges a leave


def worker_text(worker: int, *, elastic: bool) -> str:
    return f"{'worker' if elastic else 'rank'} {worker}"


class CoordinatorClient:
    """Connects this worker to the coordinator of its job. `join` makes the client.

    All threads may use the client. Only `exchange`, `poll` and `close` wait. The client
    keeps each sent message until the epoch changes, and sends it again to a coordinator
    that was restarted.

    Attributes:
        worker: the id of this worker.
        name: the name of this worker in errors, such as "worker 3".
        hello: the description that this worker has sent.
        members: the members of the newest epoch, by rank; empty before the first epoch.
        epoch: the index of the newest epoch, -1 before the first epoch.
        rank: the rank of this worker in the newest epoch; provisional for a newcomer.
        size: the member count of the newest epoch; provisional for a newcomer.
    """

    def __init__(self, worker: int, connection: Connection, hello: JsonObject) -> None:
        self.worker = worker
        self.name = worker_text(worker, elastic=connection.reconnects)
        self._first: EpochDirective | Welcome | Dismiss | None = None
        self.members: tuple[Member, ...] = ()
        self.epoch, self.rank, self.size = -1, -1, 0
        self._connection, self.hello = connection, hello
        self._changed = threading.Condition()
        self._reading = threading.Lock()  # held while a caller reads the connection
        self._connected = False  # whether a reply has arrived on this connection
        self._closing = False
        self._leave_acknowledged = False
        self._end: Dismiss | Fence | Stop | None = None
        self._refusal = ""
        self._term = 0  # the newest term of a coordinator
        self._newest: JsonObject = {}  # the message that announced the newest epoch
        self._resendable: dict[Hashable, JsonObject] = {}
        self._directives: list[Directive] = []
        self._revoked: Revoke | None = None
        self._departed: dict[int, str] = {}
        self._finished: JsonObject = {}  # last progress of each rank that has left
        self._exchanging, self._exchanges = threading.Lock(), 0
        self._requests = 0  # the requests of `locate` so far
        # The addresses that `locate` has received, by the ids of the workers.
        self._addresses: dict[int, WorkerAddress] = {}
        # The replies that no caller has taken yet, by the key of the request.
        self._replies: dict[Hashable, JsonObject] = {}
        self._missing: str | None = None  # the ranks that have not joined, as text
        self._wakeup_fd = -1  # an eventfd that is readable while there are directives

    def enter(self, deadline: float, warning: InitWarning) -> None:
        """Connects and waits for the first directive until `deadline`.

        Only `join` calls this method.

        Raises:
            OSError: no coordinator replies.
            StartupError: the coordinator refuses this worker, or too few workers
                connected.
            AuthenticationError: the coordinator does not have the secret.
            Fenced: this worker has been declared lost.
        """
        self._connection.attach(self, self._changed)
        try:
            where = self._connection.open(deadline)
            try:
                self._wait_for_first(deadline + GRACE, warning)
            except OSError as error:  # `join` catches OSError and tries again
                raise OSError(f"{where}: {error}") from error
        except BaseException:
            self.close()
            raise
        if self._connection.reconnects:
            waiting = len(self._directives)  # directives that followed the first one
            self._wakeup_fd = os.eventfd(waiting, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._connection.start_thread()

    # -- directives --------------------------------------------------------------------

    @property
    def first(self) -> EpochDirective | Welcome | Dismiss:
        """Returns the first directive. `poll` returns only later directives."""
        assert self._first is not None
        return self._first

    def _wait_for_first(self, deadline: float, warning: InitWarning) -> None:
        def answered() -> bool:
            return bool(self._first or self._end or self._refusal)

        self._read_until(answered, min(deadline, warning.due))
        if not answered() and warning.due < deadline:
            with self._changed:
                self._connection.send({"type": "missing"})
            self._read_until(lambda: answered() or self._missing is not None, deadline)
            warning.missing_ranks(self._missing or "")
            self._read_until(answered, deadline)
        if self._first is not None:
            return
        if isinstance(self._end, Fence):
            raise Fenced(f"{self.name} was declared lost: {self._end.text}")
        why = self._refusal or (self._end and self._end.text)
        raise StartupError(why or f"{self.name} got no membership in time")

    def _read_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Reads messages in this thread. Raises the errors of `Connection.read`."""
        while not done() and self._connection.read(deadline):
            pass

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `poll` has directives."""
        return self._wakeup_fd

    def poll(self, seconds: float = 0.0) -> list[Directive]:
        """Returns the new directives; waits up to `seconds` for the first one."""
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
        """Returns the lost and departed ranks of the newest epoch, with the reasons."""
        if not self._connection.reconnects and self._reading.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, AuthenticationError):
                    self._read_until(lambda: False, 0.0)
            finally:
                self._reading.release()
        with self._changed:
            return dict(self._departed)

    # -- reports and requests ----------------------------------------------------------

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
        """Reports the progress of this worker's communicators in an epoch that is over.

        The arguments are those of `CommitReport`.

        Args:
            epoch: the newest epoch that an `EpochDirective` announced.
            lines: a communicator that was never installed in this epoch has the entry
                (0, 0, True) or no entry.
            restart: pass True if, for example, device memory is lost.
            text: the reason for the report, for the log.
        """
        message = directives.progress_message("report", epoch, sets, next_set)
        message["lines"] = {str(number): list(line) for number, line in lines.items()}
        self._send("report", message | {"restart": restart, "text": text}, epoch)

    def suspect(self, epoch: int, rank: int, text: str) -> None:
        """Reports that this worker cannot reach a rank of `epoch`, with the reason."""
        message = {"type": "suspect", "epoch": epoch, "rank": rank, "text": text[:4096]}
        self._send(("suspect", rank), message, epoch)

    def ready(self, *, cold: bool = False) -> None:
        """Announces that this newcomer has warmed up and may become a member.

        `cold` says that it has nothing to warm up, and compiles as a member.
        """
        self._send("ready", {"type": "ready", "cold": cold})

    def pause(
        self,
        epoch: int,
        number: int,
        sets: Mapping[int, Sequence[int]] | None = None,
        next_set: int = 0,
    ) -> None:
        """Announces that this member waits at a step boundary for the next epoch.

        Either all members or no members pause for the `ResizePending` with this
        `number`. If an `EpochDirective` of kind "repair" arrives before the next epoch
        begins, call `pause` again with the new epoch. For `sets` and `next_set` see
        `CommitReport`.
        """
        message = directives.progress_message("pause", epoch, sets, next_set)
        self._send("pause", message | {"number": number}, epoch)

    def request_leave(self) -> None:
        """Requests that this worker leaves the job at the next pause."""
        self._send("leaving", {"type": "leaving"})

    def restart(self, epoch: int, text: str) -> None:
        """Makes all members return to their last commit.

        If an `EpochDirective` of kind "repair" arrives before the restart, call
        `restart` again with the new epoch.
        """
        message = {"type": "restart", "epoch": epoch, "text": text[:4096]}
        self._send("restart", message, epoch)

    def exchange(
        self, value: Any, seconds: float, what: str, epoch: int | None = None
    ) -> list[Any]:
        """Sends a JSON value, and returns the values of all ranks in rank order.

        All ranks of an epoch make the same exchanges in the same order.

        Args:
            seconds: how long to wait for the other ranks.
            what: the name of the exchange in errors.
            epoch: the epoch of the caller; pass None for the newest epoch.

        Raises:
            PeerLost: the epoch is over.
            Stalled: not all ranks took part in time. The text names the missing ranks.
        """
        with self._exchanging:
            with self._changed:
                own = self.epoch if epoch is None else epoch
                self._check_epoch(own, what)
                number, self._exchanges = self._exchanges, self._exchanges + 1
                # Keep the value of the previous exchange, too: a rank may still wait in
                # that exchange, and needs the value if the coordinator is restarted. No
                # rank is further behind.
                self._resendable.pop(("exchange", number - 2), None)
                message = {"type": "exchange", "epoch": own, "number": number}
                message |= {"value": value, "seconds": seconds}
                self._send(("exchange", number), message, own)
            reply = self._await_reply(("exchange", number), seconds + GRACE, own, what)
        if reply["type"] == "broken":
            text = f"{what}: {reply.get('text')} (waited up to {seconds:g} s)"
            raise Stalled(text, reply.get("missing", ()))
        if "same" in reply:  # all ranks have sent this value
            return [reply["same"]] * self.size
        return list(reply["values"])

    def locate(
        self, ranks: Sequence[int], seconds: float, what: str, epoch: int
    ) -> dict[int, WorkerAddress]:
        """Returns the addresses of `ranks` of an epoch, without those that are lost.

        The client asks the coordinator only for workers that are new to the client.

        Raises:
            PeerLost: the epoch is over.
            Stalled: the coordinator did not answer in time.
        """
        with self._changed:
            self._check_epoch(epoch, what)
            workers = {rank: self.members[rank].worker for rank in ranks}
            new = [r for r, w in workers.items() if w not in self._addresses]
            key = "locate", self._requests
            self._requests += 1
            message = {"type": "locate", "epoch": epoch, "number": key[1]}
            if new:
                self._send(key, message | {"ranks": compress(new)}, epoch)
        if new:
            reply = self._await_reply(key, seconds, epoch, what)
            with self._changed:
                self._resendable.pop(key, None)
                for rank, entries in reply["workers"].items():
                    found = WorkerAddress.from_json(entries)
                    self._addresses[workers[int(rank)]] = found
        known = self._addresses
        return {rank: known[w] for rank, w in workers.items() if w in known}

    def _await_reply(
        self, key: Hashable, seconds: float, epoch: int, what: str
    ) -> JsonObject:
        """Waits for the coordinator's reply to the request with this key."""
        deadline = time.monotonic() + seconds

        def arrived() -> bool:
            return key in self._replies or not self._reading.locked()

        while True:
            if not self._connection.reconnects:
                self._read_reply(key, deadline)
            with self._changed:
                if key in self._replies:
                    return self._replies.pop(key)
                self._check_epoch(epoch, what)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Stalled(f"{what}: no answer from the coordinator")
                if self._connection.reconnects:
                    self._changed.wait(left)
                else:
                    self._changed.wait_for(arrived, left)

    def _read_reply(self, key: Hashable, deadline: float) -> None:
        """Reads until the reply is here, unless another thread reads already."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._read_until(lambda: key in self._replies or bool(self._end), deadline)
        except OSError as error:
            with self._changed:
                self.give_up(f"the coordinator is gone: {error}")
        finally:
            self._reading.release()
            with self._changed:
                self._changed.notify_all()  # another thread may read now

    def _check_epoch(self, epoch: int, what: str) -> None:
        """Raises PeerLost if an epoch is over."""
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
        """Sends the reason of a failure to the launcher. Neither raises nor waits."""
        self._send("failure", {"type": "failure", "text": text[:4096]})

    def leave(
        self,
        lines: Mapping[int, CallProgress] | None = None,
        epoch: int | None = None,
        error: str = "",
    ) -> None:
        """Announces that this member has finished. The job then admits no newcomers.

        Args:
            lines: the progress of the communicators, as in `report`. From `lines`,
                ranks still inside a call detect that the call is complete on this rank.
            epoch: the last epoch that the program used, if a later epoch of kind
                "restart" or "resize" was announced; pass None for the newest epoch.
            error: why `init` has failed on this member, for the errors of the others:
                the lost rank that it names may not be known to them yet.
        """
        last = {str(number): list(line) for number, line in (lines or {}).items()}
        with self._changed:
            own = self.epoch if epoch is None else epoch
            message = {"type": "leave", "epoch": own, "lines": last}
            self._send("leave", message | ({"error": error[:1024]} if error else {}))

    def _send(
        self, key: Hashable, message: JsonObject, epoch: int | None = None
    ) -> None:
        """Sends a message now, and later also to a restarted coordinator."""
        with self._changed:
            if epoch not in (None, self.epoch) or self._end or self._closing:
                return  # the message is about an epoch that is over
            self._resendable.pop(key, None)
            self._resendable[key] = message
            if self._connected:
                self._connection.send(message)

    # -- events of the connection, see ConnectionHandler -------------------------------

    def hello_message(self) -> JsonObject:
        """Makes the hello message, with the newest epoch if the worker reconnects."""
        rejoin = None
        if self._first is not None:
            epoch = self.epoch if self._newest else -1
            rejoin = {"term": self._term, "epoch": epoch, "members": self._newest}
            rejoin["finished"] = self._finished
        hello = {"type": "hello", "worker": self.worker, "hello": self.hello}
        return hello | {"rejoin": rejoin}

    def on_disconnected(self) -> None:
        self._connected = False
        self._changed.notify_all()

    def give_up(self, text: str) -> None:
        self._on_directive(Stop(text))
        self._changed.notify_all()

    def is_finished(self) -> bool:
        over = self._leave_acknowledged or self._end is not None or bool(self._refusal)
        return over or self._closing

    def on_message(self, message: JsonObject) -> None:
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
        elif kind in _REPLIES and message.get("epoch") == self.epoch:
            self._replies[_REPLIES[str(kind)], int(message["number"])] = message
        elif (directive := directives.parse(message, self.worker)) is not None:
            self._on_directive(directive, message)
        if kind in ("members", "welcome", "resumed") and not self._connected:
            self._connected = True
            for sent in self._resendable.values():
                self._connection.send(sent)
        self._changed.notify_all()

    def _on_directive(
        self, directive: Directive, message: JsonObject | None = None
    ) -> None:
        if isinstance(directive, EpochDirective):
            self._newest = (message or {}) if self._connection.reconnects else {}
            self.members, self.epoch = directive.members, directive.epoch
            self.rank, self.size = directive.rank, len(directive.members)
            self._revoked, self._departed, self._exchanges = None, {}, 0
            self._finished = {}
            self._replies.clear()
            kept = ("leaving", "leave", "failure")
            self._resendable = {k: m for k, m in self._resendable.items() if k in kept}
        elif isinstance(directive, Welcome):
            if self._first is not None:
                return  # a coordinator that was restarted has repeated the welcome
            self.rank, self.size = directive.rank, directive.size
        elif isinstance(directive, Revoke):
            self._revoked = directive
            self._departed |= directive.lost
        elif isinstance(directive, Dismiss | Fence | Stop):
            self._end = directive
        if self._first is None and isinstance(
            directive, EpochDirective | Welcome | Dismiss
        ):
            self._first = directive
            return
        self._directives.append(directive)
        if self._wakeup_fd >= 0:
            os.eventfd_write(self._wakeup_fd, 1)

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Sends queued messages and closes the connection. Further calls do nothing.

        After `leave`, the method waits a few seconds for the acknowledgement. If the
        coordinator dies before, the client sends the leave to a restarted coordinator.
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
        with self._changed:  # `poll` in another thread may use the descriptor
            self._close_wakeup_fd()

    def close_in_child(self) -> None:
        """Closes all sockets in a forked child, which has no thread to end."""
        self._closing = True
        self._connection.close_in_child()
        self._close_wakeup_fd()

    def _close_wakeup_fd(self) -> None:
        fd, self._wakeup_fd = self._wakeup_fd, -1
        if fd >= 0:
            os.close(fd)
