"""RelayedChannel: a channel to an agent whose client (ssh) runs on another host.

An agent that runs such clients is a relay. The standard input of the client receives
the data of "write" orders, and the output of the client arrives in "output" messages.
Both travel over the channel to the relay.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

from ringjax.run.hosts.channel import Channel, Message
from ringjax.run.hosts.pipe_writer import Writer

_PIECE = 1 << 16  # most bytes of one "write" order
_WINDOW = 1 << 20  # most bytes that the relay stores for one client


class _RelayWriter(Writer):
    def __init__(self, carrier: Channel, number: int) -> None:
        super().__init__()
        self._carrier, self._number, self._room = carrier, number, 0

    def grant(self, count: int) -> None:
        self._room += count
        self.write()

    def write(self) -> None:
        while self.queue and self._room:
            head = self.queue.popleft()
            size = min(self._room, _PIECE)
            if size < len(head):
                self.queue.appendleft(head[size:])
            self._order(head[:size])
            self._room -= len(head[:size])

    def flush(self, limit: float) -> None:
        self._carrier.flush(limit)

    def close(self) -> None:
        self._order(b"")

    def _order(self, data: bytes | memoryview) -> None:
        text = base64.b64encode(data).decode()
        self._carrier.send({"do": "write", "id": self._number, "data": text})


class RelayedChannel(Channel):
    """A channel over the standard streams of a client that a relay runs.

    This class sends nothing before the first message of the agent, so that all orders
    can go to another channel if the relay's client cannot reach the host. Afterwards
    the relay never stores more than `_WINDOW` bytes, because it reports what the client
    has read. `flush` cannot wait for these reports: it flushes the carrier only.

    Args:
        carrier: the channel to the relay. number: the id of the client.
    """

    def __init__(
        self, carrier: Channel, number: int, on_message: Callable[[Message], None]
    ) -> None:
        self._relay_writer = _RelayWriter(carrier, number)
        super().__init__(self._relay_writer, on_message)
        self._opened = False

    def receive(self, data: bytes) -> None:
        """Handles output of the client."""
        messages = self._opener.feed(data)
        if messages and not self._opened:
            self._opened = True
            self.grant(_WINDOW)
        self._deliver(messages)

    def grant(self, count: int) -> None:
        """Allows `count` bytes more, which the client has read."""
        self._relay_writer.grant(count)
