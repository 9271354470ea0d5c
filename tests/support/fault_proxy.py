"""A bad network between two ends: a TCP proxy that delays, throttles, cuts and damages.

For what tc's netem would do, which needs rights and a kernel that has it, and for what
it cannot do: damage that every checksum of TCP has passed. Not for frozen processes or
hosts that vanish; see SIGSTOP and network namespaces for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """The faults of one direction of a connection.

    Attributes:
        delay: seconds of additional latency.
        rate: bytes per second; 0: no limit.
        drip: bytes per write; 0: no limit. With `delay`, this is a slow-loris attack.
        cut_after: bytes after which the connection is reset; -1: never.
        flip_at: the byte whose lowest bit is wrong; -1: none.
        close_after: bytes after which no more are handed on, and the receiver sees the
            end, while the other direction goes on; -1: never.
        stall_after: bytes after which nothing moves any more, without an end.
    """

    delay: float = 0.0
    rate: float = 0.0
    drip: int = 0
    cut_after: int = -1
    flip_at: int = -1
    close_after: int = -1
    stall_after: int = -1


class FaultProxy:
    """Listens on a port of 127.0.0.1 and hands on to another address.

    Args:
        target: where to.
        up: what happens to bytes on their way to the target.
        down: what happens to those that come back.
        times: so many connections suffer, the later ones are sound; -1: all.

    Attributes:
        connections: how many there were.
        heard: all bytes that came, on their way to the target and back.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     with FaultProxy(server.getsockname(), up=Fault(flip_at=1)) as proxy:
        ...         with socket.create_connection(proxy.address) as sock:
        ...             sock.sendall(b"abc")
        ...             server.accept()[0].recv(3)
        b'acc'
    """

    def __init__(
        self,
        target: tuple[str, int],
        up: Fault = Fault(),
        down: Fault = Fault(),
        times: int = -1,
    ) -> None:
        self._target, self._faults, self._times = target, (up, down), times
        self.connections = 0
        self.heard = bytearray(), bytearray()
        # asyncio does not keep what waits for nothing, as a stalled connection does.
        self._open: set[asyncio.Task[None] | None] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy")

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self) -> None:
        """Resets the connections that there are now."""
        self._loop.call_soon_threadsafe(
            lambda: [task.cancel() for task in list(self._open) if task is not None]
        )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = asyncio.start_server(self._connected, sock=self._listener)
        server = self._loop.run_until_complete(starting)
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_end())
        self._loop.close()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        self._open.add(asyncio.current_task())
        sound = 0 <= self._times < self.connections
        up, down = (Fault(), Fault()) if sound else self._faults
        writers = [writer]
        try:
            there, back = await asyncio.open_connection(*self._target)
            writers.append(back)
            async with asyncio.TaskGroup() as group:
                group.create_task(_hand_on(reader, back, up, self.heard[0]))
                group.create_task(_hand_on(there, writer, down, self.heard[1]))
        except* (OSError, _Cut, asyncio.CancelledError):
            pass  # the end, also of the proxy: asyncio would report it as an error
        finally:
            for each in writers:
                _reset(each)
            self._open.discard(asyncio.current_task())


async def _end() -> None:
    """Ends what a loop still does, also connections that nobody has looked at yet."""
    quiet = 0
    while quiet < 5:  # connections that have arrived, and sockets, take some rounds
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        quiet = 0 if tasks else quiet + 1


class _Cut(Exception):
    """The end that was asked for."""


async def _hand_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    fault: Fault,
    heard: bytearray,
) -> None:
    done = 0
    while piece := await reader.read(fault.drip or 1 << 16):
        heard += piece
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.rate:
            await asyncio.sleep(len(piece) / fault.rate)
        whole = bytearray(piece)
        if done <= fault.flip_at < done + len(whole):
            whole[fault.flip_at - done] ^= 1
        for limit in (fault.cut_after, fault.close_after, fault.stall_after):
            if limit >= 0:
                whole = whole[: max(0, limit - done)]
        done += len(piece)
        with contextlib.suppress(ConnectionError):
            writer.write(whole)
            await writer.drain()
        if 0 <= fault.cut_after <= done:
            raise _Cut
        if 0 <= fault.stall_after <= done:
            await asyncio.Event().wait()
        if 0 <= fault.close_after <= done:
            break
    with contextlib.suppress(OSError):
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection at once, with what is still on its way."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        linger = b"\x01\0\0\0\0\0\0\0"  # on, for no time: RST instead of FIN
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def every_fault(size: int) -> Iterator[tuple[str, Fault]]:
    """Faults that end a conversation, in all places of its first `size` bytes."""
    for at in range(size):
        yield f"cut after {at}", Fault(cut_after=at)
        yield f"byte {at} damaged", Fault(flip_at=at)
        yield f"closed after {at}", Fault(close_after=at)
