"""Where other ranks call: this rank's listening sockets and the thread behind them.

A unix socket in the abstract namespace (it has no file and goes with the process) for
ranks of this host, TCP sockets for the others. Whoever proves itself (handshake.py) is
kept under what it introduced itself as, until `mesh` takes it. Connections for a
communicator that this rank has not begun to build yet simply wait here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringjax.control import addresses as address
from ringjax.control.acceptor import Acceptor, run_once
from ringjax.control.handshake import HandshakeRequest, Purpose, callee_steps
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import TlsOffer, offer_for

_MAX_WAITING = 1 << 16  # connections; only members can cause them


class ConnectionKey(NamedTuple):
    """What a connection is; `caller` is a world rank."""

    epoch: int
    comm: int
    purpose: Purpose
    stream: int
    caller: int


class AcceptedConnection(NamedTuple):
    """A connection that has proved itself, and the key of what flows on it."""

    sock: socket.socket
    key: bytes


class LinkListener:
    """Takes the calls of the higher ranks.

    Args:
        secret: the job's secret.
        job: its id.
        rank: this rank; the calls must be meant for it, and come from higher ones.
            -1: that differs from epoch to epoch.
        size: the job's size, if `rank` is given.
        hosts: the addresses to listen on for other hosts, see `addresses`.
        log: takes sentences about refused connections.
        failed: takes a sentence if nobody can call here any more.
        tls: whether what comes over TCP is encrypted, as in RINGJAX_TLS.
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
        self._tls = offer_for(tls)
        self._rank, self._size = rank, size
        self._failed = failed
        self._oldest = 0  # epochs before this one are over
        self._accepted: dict[ConnectionKey, AcceptedConnection] = {}
        self._changed = threading.Condition()
        self._closing = False
        # Random, so that nobody can sit on the name before us.
        name = str(rank) if rank >= 0 else "e"
        self.unix_name = f"ringjax-{job}-{name}-{secrets.token_hex(8)}"
        listeners: list[socket.socket] = []
        try:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listeners.append(local)
            local.bind("\0" + self.unix_name)
            local.listen(1024)
            for host in hosts:
                # An interface may have lost its address meanwhile; others will do.
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
        self._acceptor = Acceptor(
            listeners,
            self._selector,
            lambda sock: callee_steps(secret, job, self._accepts, self._offer(sock)),
            self._admit,
            log,
        )
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-reception", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._closing:
                # Without guests there is nothing to sweep, so it can sleep long.
                rest = 0.5 if self._acceptor.has_pending else 60.0
                run_once(self._selector, rest, self._acceptor.on_error)
                self._acceptor.expire()
        except Exception as error:
            if not self._closing:
                why = f"{type(error).__name__}: {error}"
                self._failed(f"the listening thread of this rank failed: {why}")

    def _offer(self, sock: socket.socket) -> TlsOffer:
        """What leaves this host is encrypted, what stays in it is not."""
        return TlsOffer.NONE if sock.family == socket.AF_UNIX else self._tls

    def _accepts(self, introduction: HandshakeRequest) -> str:
        if not introduction.purpose.links:
            return "looks for a server, which is not here"
        if self._rank < 0:
            # An epoch that has not reached this rank yet: the connection waits.
            late = introduction.epoch < self._oldest
            return f"calls in epoch {introduction.epoch}, which is over" if late else ""
        if introduction.callee != self._rank:
            return f"looks for rank {introduction.callee}, this is {self._rank}"
        if not self._rank < introduction.caller < self._size:
            return f"claims to be rank {introduction.caller} of {self._size}"
        return ""

    def _admit(
        self,
        sock: socket.socket,
        where: str,
        introduction: HandshakeRequest,
        keys: SessionKeys,
    ) -> None:
        del where
        key = ConnectionKey(
            introduction.epoch,
            introduction.comm,
            introduction.purpose,
            introduction.stream,
            introduction.caller,
        )
        with self._changed:
            old = self._accepted.pop(key, None)  # the caller gave up on it
            if len(self._accepted) >= _MAX_WAITING or key.epoch < self._oldest:
                sock.close()
            else:
                self._accepted[key] = AcceptedConnection(sock, keys.link)
            self._changed.notify_all()
        if old is not None:
            old.sock.close()

    def hello_entries(self) -> dict[str, Any]:
        """Where to call this rank, for its hello."""
        return {"door": self.unix_name, "addresses": ",".join(self.addresses)}

    def accept(self, key: ConnectionKey, seconds: float) -> AcceptedConnection | None:
        """The connection of that key, once; None if it has not come by then."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._accepted, seconds)
            return self._accepted.pop(key, None)

    def has(self, key: ConnectionKey) -> bool:
        """Whether that connection waits here."""
        with self._changed:
            return key in self._accepted

    def discard(self, comm: int) -> None:
        """Closes what waits for a communicator that will not be built."""
        with self._changed:
            for key in [key for key in self._accepted if key.comm == comm]:
                self._accepted.pop(key).sock.close()

    def discard_before(self, epoch: int) -> None:
        """Closes what waits for epochs before this one; nobody calls there any more."""
        with self._changed:
            self._oldest = max(self._oldest, epoch)
            for key in [key for key in self._accepted if key.epoch < epoch]:
                self._accepted.pop(key).sock.close()

    def close(self) -> None:
        """Ends the thread and closes all sockets. May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(5.0)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        self._selector.close()
        self._acceptor.close()
        os.close(self._wakeup)
        for accepted in self._accepted.values():
            accepted.sock.close()
        self._accepted.clear()
