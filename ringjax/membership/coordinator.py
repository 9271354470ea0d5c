"""The coordinator is the server of a job: it executes the decisions of `JobMembership`.

This file has the sockets and the thread. membership.py (events of workers) and
epochs.py (admission, losses, new epochs) decide which worker gets a rank, and when.

The coordinator runs in ringrun, in the driver of an engine, or, without ringrun and
engine, in rank 0. It handles only control data: the members of the job, reasons of
failures, and small values that all ranks exchange. The coordinator is no key-value
store and relays no tensors. control/handshake.py authenticates every connection first.
client.py is the workers' end of the connections.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ringjax import failpoints
from ringjax.control import open_files
from ringjax.control.addresses import enable_keepalive
from ringjax.control.member import JsonObject
from ringjax.control.sealed_messages import MAX_BYTES, JsonMessage, encode
from ringjax.control.server import JobServer, ServerSession
from ringjax.errors import AuthenticationError
from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.epochs import LauncherEvent
from ringjax.membership.exchanges import Exchanges, Replies
from ringjax.membership.membership import JobMembership


class Coordinator(JobServer):
    """Serves the workers of a job. `JobMembership` decides who belongs to the job.

    The other arguments are those of `MembershipConfig` and `JobServer`.

    Args:
        max_np: the largest number of members; pass None for `np`.
        start_timeout: seconds from the hello of the first worker until the job starts
            without the missing workers, if at least `min_np` are connected.
        resume: whether the job had begun under an earlier coordinator, so that its
            members reconnect. Call `finished` for each worker that has finished.
        listeners: sockets that listen already, instead of `hosts`. The launcher keeps
            these sockets open, so that it can replace a coordinator that died.

    Attributes:
        events: a queue of tuples for the launcher:
            ("members", epoch, kind, {worker: rank})  an epoch begins
            ("gone", worker, text)       a member was lost or has finished, and the
                                         epoch continues
            ("fenced", worker, text)     a member was declared lost: end its process
            ("failure", worker, text)    a worker has reported why it fails; if it is a
                                         member, the event "fenced" follows
            ("dismissed", worker, text)  a worker has left without an error
            ("ready", worker, text)      a newcomer may become a member now; the text
                                         is "cold" if it has not compiled its step
            ("finished", worker)         a member left because it has finished
            ("ended", worker)            the reply to `ended`
            ("waiting", text)            too few members: newcomers are needed
            ("stop", text)               the job ends without success; or a job that
                                         stops at its first loss could not begin
            ("pulse",)                   the reply to `pulse`

    Example:
        >>> coordinator = Coordinator(bytes(32), "0123456789abcdef", np=2, min_np=1)
        >>> coordinator.start()
        >>> coordinator.close()
    """

    name = "coordinator"
    max_message_bytes = MAX_BYTES  # a hello contains all members after a reconnection

    def __init__(
        self,
        secret: bytes,
        job: str,
        *,
        np: int,
        min_np: int = 1,
        max_np: int | None = None,
        hosts: Sequence[str] | None = None,
        port: int = 0,
        start_timeout: float = 120.0,
        elastic_timeout: float = 600.0,
        failure_timeout: float = 5.0,
        group: int = 1,
        on_loss: Literal["repair", "stop"] = "repair",
        resume: bool = False,
        log: Callable[[str], None] | None = None,
        listeners: Sequence[socket.socket] = (),
        tls: str = "auto",
    ) -> None:
        config = self._config = MembershipConfig(
            np,
            min_np if on_loss == "repair" else np,
            np if max_np is None else max_np,
            start_timeout,
            elastic_timeout,
            failure_timeout,
            group=group,
            on_loss=on_loss,
        )
        self._membership = JobMembership(config, resume)
        self._workers: dict[int, ServerSession] = {}  # workers that have sent a hello
        self._exchanges = Exchanges(0)
        # Functions that other threads have queued for the coordinator's thread.
        self._calls: deque[Callable[[float], None]] = deque()
        self.events: queue.SimpleQueue[LauncherEvent] = queue.SimpleQueue()
        open_files.require(np, "the coordinator")
        # Each member and each newcomer needs a descriptor. The acceptor reserves a
        # quarter of the limit for connections that have not authenticated. `max_np` is
        # huge if the user has set no limit.
        open_files.raise_limit(4 * min(config.max_np, 4096))
        super().__init__(
            secret,
            job,
            hosts=() if listeners else hosts,
            port=port,
            log=log,
            listeners=listeners,
            tls=tls,
        )
        self._wakeup_fd: int | None = None  # -1 after `close`
        self._wakeup_fd_lock = threading.Lock()

    # -- methods for the launcher ------------------------------------------------------

    @property
    def wakeup(self) -> int:
        """A descriptor that is readable from a new event until `clear`."""
        with self._wakeup_fd_lock:
            # Rank 0 runs the coordinator without a launcher, and needs no descriptor.
            if self._wakeup_fd is None:
                waiting = int(not self.events.empty())
                self._wakeup_fd = os.eventfd(waiting, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._wakeup_fd

    def clear(self) -> None:
        """Resets `wakeup`. Call `clear` before taking events from the queue."""
        with self._wakeup_fd_lock, contextlib.suppress(BlockingIOError):
            if self._wakeup_fd is not None and self._wakeup_fd >= 0:
                os.eventfd_read(self._wakeup_fd)

    def process_ended(self, worker: int, text: str, heirs: bool = True) -> None:
        """Records that a worker's process has ended, see `JobMembership`."""
        self._call_soon(
            lambda now: self._membership.process_ended(worker, text, now, heirs=heirs)
        )

    def finished(self, worker: int) -> None:
        """Records that a worker has finished under an earlier coordinator."""
        self._call_soon(lambda now: self._membership.mark_finished(worker, now))

    def expected(self, worker: int) -> None:
        """Records that the process of a worker was started."""
        self._call_soon(lambda now: self._membership.expect(worker))

    def ended(self, worker: int) -> None:
        """Publishes the event "ended", after all earlier events about a worker.

        The launcher calls this method when a process has ended without an error. After
        the event, the launcher can expect no further decision about the worker.
        """
        self._call_soon(lambda now: self._publish(("ended", worker)))

    def admission(self, max_np: int) -> None:
        """Changes the largest number of members. Present members may stay."""
        self._call_soon(lambda now: self._membership.set_max_np(max_np, now))

    def pulse(self) -> None:
        """Publishes the event "pulse", to show that the coordinator's thread runs."""
        self._call_soon(lambda now: self._publish(("pulse",)))

    def _call_soon(self, function: Callable[[float], None]) -> None:
        """Calls a function in the thread of the coordinator, with the current time."""
        self._calls.append(function)
        self.wake()

    def close(self) -> None:
        """Ends the thread, and closes all sockets. Further calls do nothing."""
        super().close()
        self._close_wakeup()

    def close_in_child(self) -> None:
        super().close_in_child()
        self._close_wakeup()

    # A thread that ends because of an error leaves `wakeup` open: the launcher waits
    # for this descriptor, and still has to read the event that explains the error.
    def _close_wakeup(self) -> None:
        with self._wakeup_fd_lock:
            if self._wakeup_fd is not None and self._wakeup_fd >= 0:
                os.close(self._wakeup_fd)
            self._wakeup_fd = -1

    # -- sessions of the workers -------------------------------------------------------

    def refusal_of(self, caller: int) -> str:
        """Returns why a rank or a worker id is refused; "" if a launcher assigns it."""
        if self._config.stops_on_loss:
            size = self._config.np
            known = 0 <= caller < size
            return "" if known else f"claims to be rank {caller} of {size}"
        return "" if caller >= 0 else f"claims to be worker {caller}"

    def on_connected(self, session: ServerSession) -> None:
        """Enables keepalive in an elastic job, to detect that a worker's host is gone.

        Workers of other jobs do not reconnect, so a short failure of the network must
        not end their connections.
        """
        if not self._config.stops_on_loss:
            enable_keepalive(session.sock, self._config.failure_timeout)

    def on_message(self, session: ServerSession, message: JsonObject) -> None:
        """Handles one message of a worker."""
        now, worker = time.monotonic(), session.caller
        failpoints.passing("coordinator.heard")
        try:
            if message.get("type") == "hello":
                self._on_hello(session, message, now)
            elif self._workers.get(worker) is not session:
                return
            elif message.get("type") == "exchange":
                self._on_exchange(worker, message, now)
            else:
                self._membership.on_message(worker, message, now)
        except ValueError as error:
            raise AuthenticationError(str(error)) from None
        finally:
            self._deliver()

    def _on_hello(
        self, session: ServerSession, message: JsonObject, now: float
    ) -> None:
        hello, rejoin = message.get("hello"), message.get("rejoin")
        if not isinstance(hello, dict) or not isinstance(rejoin, dict | None):
            raise ValueError("sent no hello")
        before = self._workers.get(session.caller)
        if before is session:
            raise ValueError("said hello twice")
        if why := self._membership.duplicate_refusal(session.caller):
            self.send(session, {"type": "refused", "text": why}, last=True)
            return
        if before is not None:
            self.drop(before, "it connected again")
        self._workers[session.caller] = session
        self._membership.on_hello(session.caller, session.seen, hello, rejoin, now)

    def _on_exchange(self, worker: int, message: JsonObject, now: float) -> None:
        rank = self._membership.rank_of(worker)
        if rank >= 0 and message.get("epoch") == self._membership.epoch.number:
            self._reply(self._exchanges.put(rank, message, now))

    def _reply(self, replies: Replies) -> None:
        epoch = self._membership.epoch
        for ranks, message in replies:
            text = encode(message | {"epoch": epoch.number})
            for rank in ranks:
                self._send(epoch.order[rank], text, False)

    def on_lost(self, session: ServerSession, why: str) -> None:
        """Reports the end of a worker's connection to the membership."""
        if self._workers.get(session.caller) is session:
            del self._workers[session.caller]
            self._membership.on_disconnected(session.caller, why, time.monotonic())
            self._deliver()

    def after_round(self) -> None:
        """Runs the functions that other threads have queued, and the due timeouts."""
        now = time.monotonic()
        while self._calls:
            self._calls.popleft()(now)
        deadline = self._membership.deadline()
        if deadline is not None and now >= deadline:
            self._membership.tick(now)
        self._reply(self._exchanges.expire(now))
        self._deliver()

    def max_wait(self) -> float:
        """Returns the seconds until the next deadline of the membership."""
        deadline = self._membership.deadline()
        if self._calls:
            return 0.0
        if deadline is None:
            return 0.25
        return min(max(deadline - time.monotonic(), 0.0), 0.25)

    def _deliver(self) -> None:
        """Sends the messages and publishes the events of the membership."""
        messages, events = self._membership.drain()
        formed = any(event[0] == "members" for event in events)
        if formed:
            failpoints.passing("coordinator.formed")
        # Publish events first: a dismissed worker may exit as soon as it receives the
        # message, and the launcher must know the reason before it notices the exit.
        for event in events:
            self._publish(event)
        # Encode a message to many workers only once.
        encoded: tuple[Any, bytes] = None, b""
        for worker, message, last in messages:
            if message is not encoded[0]:
                encoded = message, encode(message)
            self._send(worker, encoded[1], last)
        # Update exchanges after the messages, so that ranks learn first that a rank
        # has left, and then that an exchange has failed.
        for event in events:
            self._update_exchanges(event)
        if formed:
            failpoints.passing("coordinator.told")

    def _publish(self, event: LauncherEvent) -> None:
        self.events.put(event)
        with self._wakeup_fd_lock, contextlib.suppress(BlockingIOError):
            if self._wakeup_fd is not None and self._wakeup_fd >= 0:
                os.eventfd_write(self._wakeup_fd, 1)

    def on_session_error(self, session: ServerSession, error: Exception) -> None:
        """Ends the coordinator, because `JobMembership` may be inconsistent now."""
        raise error

    def on_crash(self, error: Exception) -> None:
        """Publishes "stop", because the job cannot continue without a coordinator."""
        super().on_crash(error)
        self._publish(("stop", f"the coordinator failed: {error!r}"))

    def _update_exchanges(self, event: LauncherEvent) -> None:
        """Begins the exchanges of a new epoch, or fails exchanges with a lost rank."""
        epoch = self._membership.epoch
        if event[0] == "members" and event[1] == epoch.number:
            self._exchanges = Exchanges(len(epoch.order))
        elif event[0] in ("gone", "dismissed") and event[1] in epoch.order:
            rank = epoch.rank_of[event[1]]
            if rank in epoch.lost:
                self._reply(self._exchanges.remove_rank(rank, epoch.lost[rank]))

    def _send(self, worker: int, message: JsonMessage, last: bool) -> None:
        session = self._workers.get(worker)
        if session is None:
            return
        self.send(session, message, last=last)
        if last:
            del self._workers[worker]
