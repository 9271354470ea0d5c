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
from ringjax.control.handshake import Door, Introduction, Purpose, answer, turn
from ringjax.control.sealing import MOST_BYTES, Keys, Message
from ringjax.control.tls import offer
from ringjax.errors import AuthenticationError

MOST_UNREAD = 4 * MOST_BYTES  # bytes that wait for one peer before it is given up


class Seat:
    """The server's end of one session.

    Attributes:
        caller: the number that the peer introduced itself with.
        seen: its address.
    """

    def __init__(
        self, service: Service, sock: socket.socket, caller: int, seen: str, keys: Keys
    ) -> None:
        self._service, self.sock = service, sock
        self._sealer = keys.sealer()
        self._opener = keys.opener(service.most_from_peer)
        self.caller, self.seen = caller, seen
        self._output = bytearray()
        self._ending = False  # close once the output is written

    def send(self, message: Message, *, last: bool = False) -> None:
        """Writes what is possible now, the rest later.

        Raises:
            OSError: the connection is gone, or the peer does not read.
        """
        if len(self._output) > self._service.most_unread:
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


class Service(abc.ABC):
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
    most_from_peer = 1 << 20  # bytes of one message
    most_unread = MOST_UNREAD

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
        offered = offer(tls)
        self._seats: set[Seat] = set()
        self._broken: deque[tuple[Seat, str]] = deque()
        self._closing = False
        self._waking = threading.RLock()  # of the eventfd; a signal may wake, too
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
        self._door = Door(
            doors,
            self.selector,
            lambda sock: answer(secret, job, self._accepts, offered),
            self._admit,
            log or self._print,
        )

    # --- what a subclass says ---

    @abc.abstractmethod
    def refuses(self, caller: int) -> str:
        """Why somebody with this number is not let in; nothing if it is."""

    def take(self, seat: Seat) -> None:  # noqa: B027  (some only wait for messages)
        """Somebody has proved itself."""

    @abc.abstractmethod
    def on_message(self, seat: Seat, message: dict[str, Any]) -> None:
        """Serves one genuine message."""

    @abc.abstractmethod
    def on_lost(self, seat: Seat, why: str) -> None:
        """A session has ended; the seat is closed already."""

    def on_turn(self) -> None:  # noqa: B027  (some do nothing between rounds)
        """Called after each round of the loop."""

    def on_fault(self, seat: Seat, error: Exception) -> None:
        """Called when a session's message could not be served: that session ends."""
        self.on_crash(error)
        self.drop(seat, f"it could not be served: {type(error).__name__}: {error}")

    def on_crash(self, error: Exception) -> None:
        """Called when the thread ends because of a fault of its own."""
        stderr.line("".join(traceback.format_exception(error)).rstrip())

    def rest(self) -> float:
        """The most seconds until `on_turn` is to be called again."""
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
        with self._waking:
            if self._wakeup >= 0:  # it may have ended by itself
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Ends the thread and closes every connection. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self.wake()
        if self._thread is None:
            self.release()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _serve(self) -> None:
        try:
            while not self._closing:
                turn(self.selector, self.rest(), self._on_fault)
                self._door.sweep()
                self.on_turn()
                while self._broken:
                    self.drop(*self._broken.popleft())
        except Exception as error:
            self.on_crash(error)
        finally:
            self.release()

    def release(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        self.selector.close()
        self._door.close()
        for seat in self._seats:
            seat.sock.close()
        self._seats.clear()
        # A forked child may have been made while another thread had it.
        held = self._waking.acquire(timeout=1.0)
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1
        if held:
            self._waking.release()

    def _on_fault(self, sock: object, error: Exception) -> None:
        """Something was wrong with one connection; see `on_fault`."""
        seat = next((seat for seat in self._seats if seat.sock is sock), None)
        if seat is None:
            self._door.fault(sock, error)
        else:
            self.on_fault(seat, error)

    def _accepts(self, introduction: Introduction) -> str:
        if introduction.purpose != Purpose.RENDEZVOUS:
            return f"wants {introduction.purpose.name.lower()} from the {self.name}"
        return self.refuses(introduction.caller)

    def _admit(
        self, sock: socket.socket, where: str, introduction: Introduction, keys: Keys
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seat = Seat(self, sock, introduction.caller, where, keys)
        self._seats.add(seat)
        self.selector.register(sock, selectors.EVENT_READ, seat.turn)
        self.take(seat)

    def send(self, seat: Seat, message: Message, *, last: bool = False) -> None:
        """Sends it, or ends the session once this round of the loop is done.

        Not at once: whoever sends is in the middle of something, perhaps of telling
        everybody that another session has ended.
        """
        try:
            seat.send(message, last=last)
        except OSError as error:
            self._broken.append((seat, str(error)))

    def drop(self, seat: Seat, why: str) -> None:
        """Ends a session, if it has not ended yet."""
        if seat not in self._seats:
            return
        self._seats.discard(seat)
        self.selector.unregister(seat.sock)
        seat.sock.close()
        self.on_lost(seat, why)

    def _print(self, text: str) -> None:
        stderr.line(f"[ringjax {self.name}] {text}")
