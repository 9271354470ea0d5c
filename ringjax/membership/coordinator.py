"""The coordinator of a job: sockets around `Membership`, in one thread.

It runs in ringrun, in the driver of an engine, or, without either, in rank 0. It
carries what is not data: who belongs to the job, reasons of failures, small values that
all ranks exchange. It is no key-value store, and it relays no tensors. Every connection
is authenticated first (control/handshake.py), the ranks' end is client.py, and what is
decided is decided in membership.py.
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
from ringjax.control.connecting import enable_keepalive
from ringjax.control.sealed_messages import MAX_BYTES, JsonMessage, encode
from ringjax.control.server import JobServer, ServerSession
from ringjax.errors import AuthenticationError
from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.exchanges import Exchanges, Replies
from ringjax.membership.membership import JobMembership
from ringjax.membership.outbox import LauncherEvent


class Coordinator(JobServer):
    """Decides who belongs to a job.

    Args:
        secret: the job's secret.
        job: its id, 16 hexadecimal digits.
        np: how many workers start it.
        min_np: with fewer members the job waits for newcomers.
        max_np: the most members; `np` if it is None.
        hosts: the addresses to listen on; None: this machine's loopback alone.
        port: the same port on each of them; 0 takes a free one for each.
        start_timeout: seconds from the first worker's appearance to the last one's;
            then the job starts with those who are there if they are `min_np`.
        elastic_timeout: seconds to wait for newcomers when there are too few members.
        failure_timeout: seconds for a member to report after an epoch was revoked.
        group: so many workers are lost and join together, those with one w // group.
        on_loss: "repair": the job goes on without members that are lost, and is
            elastic; "stop": it has `np` ranks, its workers are numbered by rank, and
            the launcher ends it at the first loss.
        resume: the job had begun under an earlier coordinator, which is gone: the
            members come back. Tell it then who has `finished`.
        log: takes sentences about refused connections.
        listeners: sockets that listen already, instead of `hosts`; the launcher keeps
            them, so that another coordinator can take the place of one that died.
        tls: whether sessions are encrypted, as in RINGJAX_TLS.

    Attributes:
        addresses: where it listens, "host:port" each.
        events: what happened, as tuples:
            ("members", epoch, kind, {worker: rank})  an epoch begins
            ("gone", worker, text)       a member was lost or has finished, and the
                                         epoch goes on
            ("fenced", worker, text)     a member was declared lost; end its process
            ("failure", worker, text)    what a worker said before it went down; it is
                                         fenced too, if it was a member
            ("dismissed", worker, text)  it left, as it had asked for, or is not needed
            ("ready", worker)            a newcomer could be a member now
            ("finished", worker)         a member left because it has finished
            ("ended", worker)            the answer to `ended`
            ("waiting", text)            too few members: newcomers are needed
            ("stop", text)               the job ends without success; or, if it stops
                                         at its first loss, did not come together
            ("pulse",)                   the answer to `pulse`
        wakeup: a descriptor that is readable while there may be events; it is not to be
            read, `clear` does that.

    Raises:
        StartupError: it cannot listen there, or it must encrypt and cannot.

    Example:
        >>> coordinator = Coordinator(bytes(32), "0123456789abcdef", np=2, min_np=1)
        >>> coordinator.start()
        >>> coordinator.close()
    """

    name = "coordinator"
    max_message_bytes = MAX_BYTES  # a worker that comes back sends the membership

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
        most = np if max_np is None else max_np
        self._rules = MembershipConfig(
            *(np, min_np if on_loss == "repair" else np, most, start_timeout),
            *(elastic_timeout, failure_timeout),
            group=group,
            on_loss=on_loss,
        )
        self._membership = JobMembership(self._rules, resume)
        self._workers: dict[int, ServerSession] = {}  # workers that have said hello
        self._exchanges = Exchanges(0)
        self._calls: deque[Callable[[float], None]] = deque()  # by other threads
        self.events: queue.SimpleQueue[LauncherEvent] = queue.SimpleQueue()
        open_files.require(np, "the coordinator")
        # Members need one each, and so do newcomers whose places are still taken; and
        # a door gives a fourth of all to callers that have not proved themselves. The
        # number of members is often not limited at all.
        open_files.raise_limit(4 * min(most, 4096))
        super().__init__(
            secret,
            job,
            hosts=() if listeners else hosts,
            port=port,
            log=log,
            listeners=listeners,
            tls=tls,
        )
        self._wakeup_fd: int | None = None  # nobody has asked for it
        self._wakeup_fd_lock = threading.Lock()  # guards the bell

    # --- the launcher's side ---

    @property
    def wakeup(self) -> int:
        """Without a launcher, which alone asks for it, it costs no descriptor."""
        with self._wakeup_fd_lock:
            if self._wakeup_fd is None:
                waiting = int(not self.events.empty())
                self._wakeup_fd = os.eventfd(waiting, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._wakeup_fd

    def clear(self) -> None:
        """Makes `wakeup` unreadable; call it before taking events from the queue."""
        with self._wakeup_fd_lock, contextlib.suppress(BlockingIOError):
            if self._wakeup_fd is not None and self._wakeup_fd >= 0:
                os.eventfd_read(self._wakeup_fd)

    def process_ended(self, worker: int, text: str, heirs: bool = True) -> None:
        """A worker's process has ended. It is no loss if the worker had finished.

        `heirs`: if it was the last one, newcomers may begin the job afresh.
        """
        self._call_soon(
            lambda now: self._membership.process_ended(worker, text, now, heirs=heirs)
        )

    def finished(self, worker: int) -> None:
        """For a coordinator that was started anew: an earlier one heard so."""
        self._call_soon(lambda now: self._membership.finished(worker, now))

    def expected(self, worker: int) -> None:
        """A process was started as this worker; it has not said anything yet."""
        self._call_soon(lambda now: self._membership.expected(worker))

    def ended(self, worker: int) -> None:
        """A worker's process has ended without an error: says so once more.

        What was decided about the worker before comes before that event.
        """
        self._call_soon(lambda now: self._publish(("ended", worker)))

    def admission(self, max_np: int) -> None:
        """Changes the most members there may be; nobody is sent away for it."""
        self._call_soon(lambda now: self._membership.admission(max_np, now))

    def pulse(self) -> None:
        """Has the thread say that it is not hung."""
        self._call_soon(lambda now: self._publish(("pulse",)))

    def _call_soon(self, what: Callable[[float], None]) -> None:
        self._calls.append(what)
        self.wake()

    def close(self) -> None:
        """Ends the thread, closes all sockets and `wakeup`. May be called twice."""
        super().close()
        self._close_wakeup()

    def close_in_child(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have.

        A thread that ends by itself leaves `wakeup` open: the launcher, which waits for
        that descriptor, still has to read why.
        """
        super().close_in_child()
        if self._thread is not threading.current_thread():
            self._close_wakeup()

    def _close_wakeup(self) -> None:
        with self._wakeup_fd_lock:
            if self._wakeup_fd is not None and self._wakeup_fd >= 0:
                os.close(self._wakeup_fd)
            self._wakeup_fd = -1

    # --- the workers' side ---

    def refusal_of(self, caller: int) -> str:
        """Numbers that no launcher gives."""
        if self._rules.stops:
            size = self._rules.np
            known = 0 <= caller < size
            return "" if known else f"claims to be rank {caller} of {size}"
        return "" if caller >= 0 else f"claims to be worker {caller}"

    def on_connected(self, session: ServerSession) -> None:
        """Watches the connection, so that a host which has gone is noticed.

        Where nobody repairs the job, a pause of the network must not cost a connection
        that nobody builds up again.
        """
        if not self._rules.stops:
            enable_keepalive(session.sock, self._rules.failure_timeout)

    def on_message(self, session: ServerSession, message: dict[str, Any]) -> None:
        """Serves one genuine message of a worker."""
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
                self._membership.said(worker, message, now)
        except ValueError as error:
            raise AuthenticationError(str(error)) from None
        finally:
            self._deliver()

    def _on_hello(
        self, session: ServerSession, message: dict[str, Any], now: float
    ) -> None:
        hello, rejoin = message.get("hello"), message.get("rejoin")
        if not isinstance(hello, dict) or not isinstance(rejoin, dict | None):
            raise ValueError("sent no hello")
        before = self._workers.get(session.caller)
        if before is session:
            raise ValueError("said hello twice")
        if why := self._membership.second(session.caller):
            self.send(session, {"type": "refused", "text": why}, last=True)
            return
        if before is not None:
            self.drop(before, "it connected again")
        self._workers[session.caller] = session
        self._membership.hello(session.caller, session.seen, hello, rejoin, now)

    def _on_exchange(self, worker: int, message: dict[str, Any], now: float) -> None:
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
        """A worker's connection has ended."""
        if self._workers.get(session.caller) is session:
            del self._workers[session.caller]
            self._membership.closed(session.caller, why, time.monotonic())
            self._deliver()

    def after_round(self) -> None:
        """Does what other threads asked for, and what time has come for."""
        now = time.monotonic()
        while self._calls:
            self._calls.popleft()(now)
        deadline = self._membership.deadline()
        if deadline is not None and now >= deadline:
            self._membership.tick(now)
        self._reply(self._exchanges.sweep(now))
        self._deliver()

    def max_wait(self) -> float:
        """Until the membership has something to do by itself."""
        deadline = self._membership.deadline()
        if self._calls:
            return 0.0
        if deadline is None:
            return 0.25
        return min(max(deadline - time.monotonic(), 0.0), 0.25)

    def _deliver(self) -> None:
        """Sends and tells what the membership has decided."""
        mail, news = self._membership.take()
        formed = any(event[0] == "members" for event in news)
        if formed:
            failpoints.passing("coordinator.formed")
        # First to the launcher: a worker that is told to leave may end at once, and its
        # end must not be taken for that of the job.
        for event in news:
            self._publish(event)
        encoded: tuple[Any, bytes] = None, b""  # many are told the same
        for worker, message, last in mail:
            if message is not encoded[0]:
                encoded = message, encode(message)
            self._send(worker, encoded[1], last)
        # Behind the mail: who hears that an exchange is broken off knows who has gone.
        for event in news:
            self._update_exchanges(event)
        if formed:
            failpoints.passing("coordinator.told")

    def _publish(self, event: LauncherEvent) -> None:
        self.events.put(event)
        with self._wakeup_fd_lock, contextlib.suppress(BlockingIOError):
            if self._wakeup_fd is not None and self._wakeup_fd >= 0:
                os.eventfd_write(self._wakeup_fd, 1)

    def on_session_error(self, session: ServerSession, error: Exception) -> None:
        """The rules may be in the middle of something, so it is a crash."""
        raise error

    def on_crash(self, error: Exception) -> None:
        """Without a coordinator the job cannot go on, and the launcher must know."""
        super().on_crash(error)
        self._publish(("stop", f"the coordinator failed: {error!r}"))

    def _update_exchanges(self, event: LauncherEvent) -> None:
        """Keeps the exchanges with the epoch."""
        epoch = self._membership.epoch
        if event[0] == "members" and event[1] == epoch.number:
            self._exchanges = Exchanges(len(epoch.order))
        elif event[0] in ("gone", "dismissed") and event[1] in epoch.order:
            rank = epoch.order.index(event[1])
            if rank in epoch.lost:
                self._reply(self._exchanges.remove(rank, epoch.lost[rank]))

    def _send(self, worker: int, message: JsonMessage, last: bool) -> None:
        session = self._workers.get(worker)
        if session is None:
            return
        self.send(session, message, last=last)
        if last:
            del self._workers[worker]
