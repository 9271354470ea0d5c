"""The sockets on which other ranks connect to this rank.

Ranks of this host connect to a unix socket in the abstract namespace, because such a
socket has no file and disappears with the process. Ranks of other hosts connect over
TCP. A thread accepts and authenticates connections (handshake.py), and keeps each
connection until links/factory.py calls `accept`, because another rank may connect
before this rank begins to build the communicator.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringjax.control import addresses as address
from ringjax.control.acceptor import Acceptor, run_once
from ringjax.control.handshake import (
    HandshakeRequest,
    HandshakeSteps,
    Purpose,
    callee_steps,
)
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import TlsOffer, offer_for

# The most connections that may wait for `accept`. All of them have authenticated.
_MAX_WAITING = 1 << 16


class ConnectionKey(NamedTuple):
    """Identifies a connection between two ranks; `caller` is a world rank."""

    epoch: int
    comm: int
    purpose: Purpose
    stream: int
    caller: int


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """An authenticated connection, and its encryption key (see `SessionKeys.link`)."""

    sock: socket.socket
    key: bytes = field(repr=False)


class LinkListener:
    """Accepts the connections of higher ranks.

    Args:
        rank: this rank. A caller must name this rank, and must have a higher rank. Pass
            -1 in an elastic job, where ranks change, to check no ranks.
        size: the size of the job; unused if `rank` is -1.
        hosts: the addresses on which ranks of other hosts connect, see `addresses`.
        log: called with a sentence about each refused connection.
        failed: called with a sentence if the thread fails, so that no rank can connect.
        tls: whether data over TCP are encrypted, as in RINGJAX_TLS.
    """

    def __init__(
        self,
        secret: bytes,
        job: str,
        *,
        rank: int,
        size: int = 0,
        hosts: Sequence[str],
        log: Callable[[str], None],
        failed: Callable[[str], None],
        tls: str = "auto",
    ) -> None:
        own_offer = offer_for(tls)
        self._rank, self._size = rank, size
        self._failed = failed
        self._oldest = 0  # the oldest epoch whose connections are accepted
        self._accepted: dict[ConnectionKey, AcceptedConnection] = {}
        self._changed = threading.Condition()
        self._closing = False
        # Use a random name, because another user could bind a predictable name first.
        name = str(rank) if rank >= 0 else "e"
        self.unix_name = f"ringjax-{job}-{name}-{secrets.token_hex(8)}"
        listeners: list[socket.socket] = []
        try:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listeners.append(local)
            local.bind("\0" + self.unix_name)
            local.listen(1024)
            for host in hosts:
                # An interface may have lost its address. One usable address is enough.
                with contextlib.suppress(OSError):
                    listeners.append(address.listen(host))
            if hosts and len(listeners) == 1:
                raise OSError(f"cannot listen on any of {', '.join(hosts)}")
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self.addresses = [address.show(*s.getsockname()[:2]) for s in listeners[1:]]
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wakeup, selectors.EVENT_READ, os.eventfd_read)

        def steps(sock: socket.socket) -> HandshakeSteps:
            # Data on unix sockets stay within this host, so do not encrypt them.
            offer = TlsOffer.NONE if sock.family == socket.AF_UNIX else own_offer
            return callee_steps(secret, job, self._refusal_of, offer)

        self._acceptor = Acceptor(listeners, self._selector, steps, self._admit, log)
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-link-listener", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._closing:
                # Only running handshakes have a timeout. Sleep long if there are none.
                pause = 0.5 if self._acceptor.has_pending else 60.0
                run_once(self._selector, pause, self._acceptor.on_error)
                self._acceptor.expire()
        except Exception as error:
            if not self._closing:
                why = f"{type(error).__name__}: {error}"
                self._failed(f"the listening thread of this rank failed: {why}")

    def _refusal_of(self, request: HandshakeRequest) -> str:
        if not request.purpose.is_link:
            return "looks for a server, which is not here"
        if self._rank < 0:
            # Admit connections of later epochs: the caller may enter an epoch before
            # this rank does, and its connection then waits for `accept`.
            late = request.epoch < self._oldest
            return f"calls in epoch {request.epoch}, which is over" if late else ""
        if request.callee != self._rank:
            return f"looks for rank {request.callee}, this is {self._rank}"
        if not self._rank < request.caller < self._size:
            return f"claims to be rank {request.caller} of {self._size}"
        return ""

    def _admit(
        self,
        sock: socket.socket,
        where: str,
        request: HandshakeRequest,
        keys: SessionKeys,
    ) -> None:
        del where
        key = ConnectionKey(
            request.epoch,
            request.comm,
            request.purpose,
            request.stream,
            request.caller,
        )
        with self._changed:
            old = self._accepted.pop(key, None)  # the caller has connected again
            if len(self._accepted) >= _MAX_WAITING or key.epoch < self._oldest:
                sock.close()
            else:
                self._accepted[key] = AcceptedConnection(sock, keys.link)
            self._changed.notify_all()
        if old is not None:
            old.sock.close()

    def hello_entries(self) -> dict[str, str]:
        """Returns the addresses of this listener, for the hello of this rank."""
        return {"door": self.unix_name, "addresses": ",".join(self.addresses)}

    def accept(self, key: ConnectionKey, seconds: float) -> AcceptedConnection | None:
        """Waits for a connection and returns it, or returns None after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._accepted, seconds)
            return self._accepted.pop(key, None)

    def has(self, key: ConnectionKey) -> bool:
        """Returns whether a connection waits for `accept`."""
        with self._changed:
            return key in self._accepted

    def discard_before(self, epoch: int) -> None:
        """Closes and refuses all connections of epochs before `epoch`."""
        with self._changed:
            self._oldest = max(self._oldest, epoch)
            for key in [key for key in self._accepted if key.epoch < epoch]:
                self._accepted.pop(key).sock.close()

    def close(self) -> None:
        """Ends the thread and closes all sockets. Further calls do nothing."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(5.0)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Closes all sockets in a forked child, which has no thread to end."""
        self._closing = True
        self._selector.close()
        self._acceptor.close()
        os.close(self._wakeup)
        for accepted in self._accepted.values():
            accepted.sock.close()
        self._accepted.clear()
