"""A server of one job: listening sockets, authenticated sessions, one thread.

What a job's coordinator and the directory of a data service have in common; what they
say is their own. A session is a stream of sealed JSON messages (sealing.py). Losing one
is told to the subclass, never raised.
"""

from __future__ import annotations

import abc
import contextlib
import os
import selectors
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ringjax import stderr
from ringjax.control import addresses as address
from ringjax.control.acceptor import Acceptor, run_once
from ringjax.control.handshake import HandshakeRequest, Purpose, callee_steps
from ringjax.control.sealed_messages import MAX_BYTES, JsonMessage, SessionKeys
from ringjax.control.tls import offer_for
from ringjax.errors import AuthenticationError

MAX_UNREAD = 4 * MAX_BYTES  # bytes that wait for one peer before it is given up


class ServerSession:
    """The server's end of one session.

    Attributes:
        caller: the number that the peer introduced itself with.
        seen: its address.
    """

    def __init__(
        self,
        service: JobServer,
        sock: socket.socket,
        caller: int,
        seen: str,
        keys: SessionKeys,
    ) -> None:
        self._service, self.sock = service, sock
        self._sealer = keys.sealer()
        self._opener = keys.opener(service.max_message_bytes)
        self.caller, self.seen = caller, seen
        self._output = bytearray()
        self._ending = False  # close once the output is written

    def send(self, message: JsonMessage, *, last: bool = False) -> None:
        """Writes what is possible now, the rest later.

        Raises:
            OSError: the connection is gone, or the peer does not read.
        """
        if len(self._output) > self._service.max_unread:
            raise OSError("it does not read what it is sent")
        self._output += self._sealer.seal(message)
        self._ending |= last
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._output:
                del self._output[: self.sock.send(self._output[: 1 << 16])]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._output else 0)
        self._service.selector.modify(self.sock, wanted, self.turn)

    def turn(self, sock: socket.socket) -> None:
        """Reads and writes what is possible now."""
        try:
            if self._output:
                self._write()
            with contextlib.suppress(BlockingIOError):
                piece = sock.recv(1 << 16)
                if not piece:
                    raise ConnectionResetError("the connection was closed")
                for message in self._opener.feed(piece):
                    self._service.on_message(self, message)
        except (OSError, AuthenticationError) as error:
            self._service.drop(self, str(error))
            return
        if self._ending and not self._output:
            self._service.drop(self, "it was sent away")


class JobServer(abc.ABC):
    """Serves one job. Subclasses say whom they take and what they answer.

    Args:
        secret: the job's secret.
        job: its id, 16 hexadecimal digits.
        hosts: the addresses to listen on; None: this machine's loopback alone.
        port: the same port on each of them; 0 takes a free one for each.
        log: takes sentences about refused connections.
        listeners: sockets that listen already, besides `hosts`.
        tls: whether sessions are encrypted, as in RINGJAX_TLS.

    Attributes:
        name: in sentences and of the thread.
        addresses: where it listens, "host:port" each.

    Raises:
        StartupError: it cannot listen there, or it must encrypt and cannot.
    """

    name = "service"
    max_message_bytes = 1 << 20  # bytes of one message
    max_unread = MAX_UNREAD

    def __init__(
        self,
        secret: bytes,
        job: str,
        *,
        hosts: Sequence[str] | None,
        port: int,
        log: Callable[[str], None] | None,
        listeners: Sequence[socket.socket] = (),
        tls: str = "auto",
    ) -> None:
        offered = offer_for(tls)
        self._sessions: set[ServerSession] = set()
        self._failed_sends: deque[tuple[ServerSession, str]] = deque()
        self._closing = False
        self._wakeup_lock = threading.RLock()  # of the eventfd; a signal may wake, too
        self._thread: threading.Thread | None = None
        doors = list(listeners)
        doors += address.listen_on(
            [address.loopback()] if hosts is None else hosts, port
        )
        self.addresses = [address.show(*s.getsockname()[:2]) for s in doors]
        self.selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(
            self._wakeup, selectors.EVENT_READ, lambda fd: os.eventfd_read(fd)
        )
        self._acceptor = Acceptor(
            doors,
            self.selector,
            lambda sock: callee_steps(secret, job, self._accepts, offered),
            self._admit,
            log or self._print,
        )

    # --- what a subclass says ---

    @abc.abstractmethod
    def refusal_of(self, caller: int) -> str:
        """Why somebody with this number is not let in; nothing if it is."""

    def on_connected(self, session: ServerSession) -> None:  # noqa: B027  (some only wait for messages)
        """Somebody has proved itself."""

    @abc.abstractmethod
    def on_message(self, session: ServerSession, message: dict[str, Any]) -> None:
        """Serves one genuine message."""

    @abc.abstractmethod
    def on_lost(self, session: ServerSession, why: str) -> None:
        """A session has ended; the session is closed already."""

    def after_round(self) -> None:  # noqa: B027  (some do nothing between rounds)
        """Called after each round of the loop."""

    def on_session_error(self, session: ServerSession, error: Exception) -> None:
        """Called when a session's message could not be served: that session ends."""
        self.on_crash(error)
        self.drop(session, f"it could not be served: {type(error).__name__}: {error}")

    def on_crash(self, error: Exception) -> None:
        """Called when the thread ends because of a fault of its own."""
        stderr.line("".join(traceback.format_exception(error)).rstrip())

    def max_wait(self) -> float:
        """The most seconds until `after_round` is to be called again."""
        return 0.25

    # --- what they need not ---

    def start(self) -> None:
        """Serves in a daemon thread until `close`."""
        self._thread = threading.Thread(
            target=self._serve, name=f"ringjax-{self.name}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread do a round now; from any thread."""
        with self._wakeup_lock:
            if self._wakeup >= 0:  # it may have ended by itself
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Ends the thread and closes every connection. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self.wake()
        if self._thread is None:
            self.close_in_child()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _serve(self) -> None:
        try:
            while not self._closing:
                run_once(self.selector, self.max_wait(), self._on_error)
                self._acceptor.expire()
                self.after_round()
                while self._failed_sends:
                    self.drop(*self._failed_sends.popleft())
        except Exception as error:
            self.on_crash(error)
        finally:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        self.selector.close()
        self._acceptor.close()
        for session in self._sessions:
            session.sock.close()
        self._sessions.clear()
        # A forked child may have been made while another thread had it.
        held = self._wakeup_lock.acquire(timeout=1.0)
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1
        if held:
            self._wakeup_lock.release()

    def _on_error(self, sock: object, error: Exception) -> None:
        """Something was wrong with one connection; see `on_session_error`."""
        session = next(
            (session for session in self._sessions if session.sock is sock), None
        )
        if session is None:
            self._acceptor.on_error(sock, error)
        else:
            self.on_session_error(session, error)

    def _accepts(self, introduction: HandshakeRequest) -> str:
        if introduction.purpose != Purpose.RENDEZVOUS:
            return f"wants {introduction.purpose.name.lower()} from the {self.name}"
        return self.refusal_of(introduction.caller)

    def _admit(
        self,
        sock: socket.socket,
        where: str,
        introduction: HandshakeRequest,
        keys: SessionKeys,
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session = ServerSession(self, sock, introduction.caller, where, keys)
        self._sessions.add(session)
        self.selector.register(sock, selectors.EVENT_READ, session.turn)
        self.on_connected(session)

    def send(
        self, session: ServerSession, message: JsonMessage, *, last: bool = False
    ) -> None:
        """Sends it, or ends the session once this round of the loop is done.

        Not at once: whoever sends is in the middle of something, perhaps of telling
        everybody that another session has ended.
        """
        try:
            session.send(message, last=last)
        except OSError as error:
            self._failed_sends.append((session, str(error)))

    def drop(self, session: ServerSession, why: str) -> None:
        """Ends a session, if it has not ended yet."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        self.selector.unregister(session.sock)
        session.sock.close()
        self.on_lost(session, why)

    def _print(self, text: str) -> None:
        stderr.line(f"[ringjax {self.name}] {text}")
