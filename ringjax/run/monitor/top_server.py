"""Those who look at a job with `ringjax top`: they get a message a second.

In ringrun's loop, and never waited for: who has not taken a message yet gets no other,
and after a while none any more. Of too many the one that came first has to go.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ringjax.control.unix_peer import peer_uid
from ringjax.monitor import sockets

_MOST = 8
_PATIENCE = 10.0  # seconds for one to take a message
_SILENCE = 5.0  # seconds to say what one wants
_CHUNK = 1 << 16


@dataclass(slots=True, eq=False)
class _TopClient:
    """A connection; `since` it came, or was sent what it has not taken yet.

    Attributes:
        said: until it has said hello.
        looks: it has, and gets messages.
    """

    sock: socket.socket
    since: float
    said: bytes = b""
    looks: bool = False
    left: memoryview = field(default_factory=lambda: memoryview(b""))


class TopServer:
    """Takes them in.

    Args:
        changed: called when one begins or ends to look.

    Raises:
        OSError: there is no place for the socket.
    """

    def __init__(
        self, selector: selectors.BaseSelector, changed: Callable[[], None]
    ) -> None:
        self._selector, self._changed = selector, changed
        self._viewers: list[_TopClient] = []
        self._listener, self.path = sockets.listen()
        self._owner = os.getpid()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return sum(viewer.looks for viewer in self._viewers)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) != os.geteuid():
                sock.close()
                return
            while len(self._viewers) >= _MOST:
                self._forget(self._viewers[0])
            sock.setblocking(False)
            viewer = _TopClient(sock, time.monotonic())
            self._viewers.append(viewer)
            self._watch(viewer, selectors.EVENT_READ)

    def _watch(self, viewer: _TopClient, events: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(viewer.sock)
        self._selector.register(viewer.sock, events, lambda: self._turn(viewer))

    def _turn(self, viewer: _TopClient) -> None:
        """They say hello, and then nothing; but they may leave, or take more."""
        try:
            data = viewer.sock.recv(_CHUNK)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"" or (data and not viewer.looks and not self._greet(viewer, data)):
            self._forget(viewer)
        elif viewer.left:
            self._write(viewer)

    def _greet(self, viewer: _TopClient, data: bytes) -> bool:
        """Whether what was said so far may become, or is, a hello."""
        viewer.said += data
        if viewer.said == sockets.HELLO:
            viewer.looks = True
            self._changed()
        return sockets.HELLO.startswith(viewer.said)

    def sweep(self, now: float) -> None:
        """Those that do not say what they want are not kept."""
        for viewer in list(self._viewers):
            if not viewer.looks and now - viewer.since > _SILENCE:
                self._forget(viewer)

    def send(self, message: bytes) -> None:
        """For all of them."""
        now = time.monotonic()
        for viewer in [viewer for viewer in self._viewers if viewer.looks]:
            if not viewer.left:
                viewer.left, viewer.since = memoryview(message), now
                self._write(viewer)
            elif now - viewer.since > _PATIENCE:
                self._forget(viewer)

    def _write(self, viewer: _TopClient) -> None:
        try:
            viewer.left = viewer.left[viewer.sock.send(viewer.left) :]
        except BlockingIOError:
            pass
        except OSError:
            self._forget(viewer)
            return
        more = selectors.EVENT_WRITE if viewer.left else 0
        self._watch(viewer, selectors.EVENT_READ | more)

    def _forget(self, viewer: _TopClient) -> None:
        self._viewers.remove(viewer)
        with contextlib.suppress(KeyError):
            self._selector.unregister(viewer.sock)
        viewer.sock.close()
        if viewer.looks:
            self._changed()

    def close(self) -> None:
        """Ends all connections and removes the socket."""
        for viewer in list(self._viewers):
            self._forget(viewer)
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
