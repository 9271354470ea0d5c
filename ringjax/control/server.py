"""A server for one job: listening sockets, authenticated sessions, and one thread.

The coordinator of a job and the registry of a data service are subclasses, which define
the messages. A session is a stream of JSON messages with HMACs (sealed_messages.py).
The method `on_lost` notifies the subclass when a session ends. The thread catches every
exception, see `on_crash`.
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

from ringjax import stderr
from ringjax.control import addresses as address
from ringjax.control.acceptor import Acceptor, run_once
from ringjax.control.handshake import HandshakeRequest, Purpose, callee_steps
from ringjax.control.member import JsonObject
from ringjax.control.sealed_messages import MAX_BYTES, JsonMessage, SessionKeys
from ringjax.control.tls import offer_for
from ringjax.errors import AuthenticationError

MAX_UNREAD = 4 * MAX_BYTES  # bytes queued for a peer before its session is ended


class ServerSession:
    """The server's end of one session.

    Attributes:
        caller: the rank or id that the peer has named in its handshake request.
        seen: the address of the peer.
    """

    def __init__(
        self,
        server: JobServer,
        sock: socket.socket,
        caller: int,
        seen: str,
        keys: SessionKeys,
    ) -> None:
        self._server, self.sock = server, sock
        self._sealer = keys.sealer()
        self._opener = keys.opener(server.max_message_bytes)
        self.caller, self.seen = caller, seen
        self._output = bytearray()
        self._ending = False  # whether to close the session after writing the output

    def send(self, message: JsonMessage, *, last: bool = False) -> None:
        """Queues a message, and writes as much as the socket accepts without waiting.

        If `last` is true, the session ends after all queued bytes are written.

        Raises:
            OSError: the connection has ended, or the peer does not read.
        """
        if len(self._output) > self._server.max_unread:
            raise OSError("it does not read what it is sent")
        self._output += self._sealer.seal(message)
        self._ending |= last
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._output:
                del self._output[: self.sock.send(self._output[: 1 << 16])]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._output else 0)
        self._server.selector.modify(self.sock, wanted, self.on_ready)

    def on_ready(self, sock: socket.socket) -> None:
        """Reads and writes as much as possible. The event loop calls this method."""
        try:
            if self._output:
                self._write()
            with contextlib.suppress(BlockingIOError):
                piece = sock.recv(1 << 16)
                if not piece:
                    raise ConnectionResetError("the connection was closed")
                for message in self._opener.feed(piece):
                    self._server.on_message(self, message)
        except (OSError, AuthenticationError) as error:
            self._server.drop(self, str(error))
            return
        if self._ending and not self._output:
            self._server.drop(self, "it was sent away")


class JobServer(abc.ABC):
    """Serves one job. A subclass decides who may connect and replies to messages.

    Args:
        job: the id of the job, 16 hexadecimal digits.
        hosts: the addresses to listen on; pass None for the loopback address only.
        port: the port on each address. With 0, each address has another free port.
        log: called with a sentence about each refused connection.
        listeners: sockets that listen already, in addition to `hosts`.
        tls: whether sessions are encrypted, as in RINGJAX_TLS.

    Attributes:
        name: the name of the server in log lines, and of its thread.
        addresses: the addresses where the server listens, "host:port" each.

    Raises:
        StartupError: the server cannot listen on an address, or TLS is required and
            this Python does not support TLS.
    """

    name = "service"
    max_message_bytes = 1 << 20  # the longest message from a peer
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
        own_offer = offer_for(tls)
        self._sessions: set[ServerSession] = set()
        self._failed_sends: deque[tuple[ServerSession, str]] = deque()
        self._closing = False
        # Guards the eventfd. The lock is reentrant, because a signal handler may call
        # `wake` while its thread is in `wake`.
        self._wakeup_lock = threading.RLock()
        self._thread: threading.Thread | None = None
        sockets = list(listeners)
        sockets += address.listen_on(
            [address.loopback()] if hosts is None else hosts, port
        )
        self.addresses = [address.show(*s.getsockname()[:2]) for s in sockets]
        self.selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(
            self._wakeup, selectors.EVENT_READ, lambda fd: os.eventfd_read(fd)
        )
        self._acceptor = Acceptor(
            sockets,
            self.selector,
            lambda sock: callee_steps(secret, job, self._refusal_of_request, own_offer),
            self._admit,
            log or self._print,
        )

    # -- methods that a subclass overrides ---------------------------------------------

    @abc.abstractmethod
    def refusal_of(self, caller: int) -> str:
        """Returns why the peer `caller` is refused, or "" to admit the peer."""

    def on_connected(self, session: ServerSession) -> None:  # noqa: B027  (optional)
        """Handles a new session, whose peer has authenticated."""

    @abc.abstractmethod
    def on_message(self, session: ServerSession, message: JsonObject) -> None:
        """Handles one message, which has been authenticated."""

    @abc.abstractmethod
    def on_lost(self, session: ServerSession, why: str) -> None:
        """Handles the end of a session, whose socket is closed already."""

    def after_round(self) -> None:  # noqa: B027  (optional)
        """Runs after each round of the event loop."""

    def on_session_error(self, session: ServerSession, error: Exception) -> None:
        """Ends a session whose message made `on_message` raise an exception."""
        self.on_crash(error)
        why = f"it could not be served: {type(error).__name__}: {error}"
        self.drop(session, why)

    def on_crash(self, error: Exception) -> None:
        """Handles an exception that ends the thread."""
        stderr.line("".join(traceback.format_exception(error)).rstrip())

    def max_wait(self) -> float:
        """Returns the longest time in seconds until the next call of `after_round`."""
        return 0.25

    # -- the server itself -------------------------------------------------------------

    def start(self) -> None:
        """Starts a daemon thread, which serves until `close`."""
        self._thread = threading.Thread(
            target=self._serve, name=f"ringjax-{self.name}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Makes the event loop run a round now. Any thread may call this method."""
        with self._wakeup_lock:
            if self._wakeup >= 0:  # -1 if the thread has ended because of an error
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Ends the thread and closes every connection. Further calls do nothing."""
        if self._closing:
            return
        self._closing = True
        self.wake()
        if self._thread is None:
            self._close_sockets()
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
            self._close_sockets()

    def close_in_child(self) -> None:
        """Closes all sockets in a forked child, which has no thread to end."""
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._closing = True
        self.selector.close()
        self._acceptor.close()
        for session in self._sessions:
            session.sock.close()
        self._sessions.clear()
        # If the process forked while another thread held this lock, no thread of the
        # child ever releases the lock, so do not wait for long.
        held = self._wakeup_lock.acquire(timeout=1.0)
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1
        if held:
            self._wakeup_lock.release()

    def _on_error(self, sock: object, error: Exception) -> None:
        session = next((s for s in self._sessions if s.sock is sock), None)
        if session is None:
            self._acceptor.on_error(sock, error)
        else:
            self.on_session_error(session, error)

    def _refusal_of_request(self, request: HandshakeRequest) -> str:
        if request.purpose != Purpose.RENDEZVOUS:
            return f"wants {request.purpose.name.lower()} from the {self.name}"
        return self.refusal_of(request.caller)

    def _admit(
        self,
        sock: socket.socket,
        where: str,
        request: HandshakeRequest,
        keys: SessionKeys,
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session = ServerSession(self, sock, request.caller, where, keys)
        self._sessions.add(session)
        self.selector.register(sock, selectors.EVENT_READ, session.on_ready)
        self.on_connected(session)

    def send(
        self, session: ServerSession, message: JsonMessage, *, last: bool = False
    ) -> None:
        """Sends a message. If sending fails, the session ends after this round.

        The session does not end immediately, because the caller may be iterating over
        all sessions, for example to report the end of another session.
        """
        try:
            session.send(message, last=last)
        except OSError as error:
            self._failed_sends.append((session, str(error)))

    def drop(self, session: ServerSession, why: str) -> None:
        """Ends a session. Does nothing if the session has ended already."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        self.selector.unregister(session.sock)
        session.sock.close()
        self.on_lost(session, why)

    def _print(self, text: str) -> None:
        stderr.line(f"[ringjax {self.name}] {text}")
