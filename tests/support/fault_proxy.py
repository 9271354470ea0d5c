"""A TCP proxy that delays, throttles, cuts and damages the data of two endpoints.

The proxy replaces tc's netem, which needs root and a kernel module. The proxy also
damages bytes and leaves TCP's checksums correct, which netem cannot do. To freeze a
process use SIGSTOP, and to make a host vanish use network namespaces.
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
        flip_at: the byte whose lowest bit is flipped; -1: none.
        close_after: bytes after which the receiver sees the end of the stream, while
            the other direction still works; -1: never.
        stall_after: bytes after which no more bytes arrive and the stream stays open;
            -1: never.
    """

    delay: float = 0.0
    rate: float = 0.0
    drip: int = 0
    cut_after: int = -1
    flip_at: int = -1
    close_after: int = -1
    stall_after: int = -1


class FaultProxy:
    """Listens on a port of 127.0.0.1 and forwards to another address.

    Args:
        target: the address to forward to.
        up: the faults on the way to the target.
        down: the faults on the way back.
        times: the number of connections with faults; later connections have none. -1:
            all connections have faults.

    Attributes:
        connections: the number of connections so far.
        received: all bytes from callers, and all bytes from the target.

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
        self.received = bytearray(), bytearray()
        # asyncio holds tasks only weakly, so the task of a stalled connection would be
        # collected without this reference.
        self._open: set[asyncio.Task[None]] = set()
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
        """Resets all open connections."""
        self._loop.call_soon_threadsafe(
            lambda: [task.cancel() for task in list(self._open)]
        )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = asyncio.start_server(self._connected, sock=self._listener)
        server = self._loop.run_until_complete(starting)
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_end())
        self._loop.close()

    def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        task = self._loop.create_task(self._relay(self.connections, reader, writer))
        self._open.add(task)
        # A task that is cancelled before it begins runs no `finally`.
        task.add_done_callback(lambda _: _reset(writer))
        task.add_done_callback(self._open.discard)

    async def _relay(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sound = 0 <= self._times < number
        up, down = (Fault(), Fault()) if sound else self._faults
        back = None
        try:
            there, back = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, back, up, self.received[0]))
                group.create_task(_forward(there, writer, down, self.received[1]))
        except* (OSError, _Cut, asyncio.CancelledError):
            pass  # the connection or the proxy ends; asyncio would report an error
        finally:
            if back is not None:
                _reset(back)


async def _end() -> None:
    """Cancels all tasks of the loop, also those of connections not yet accepted."""
    quiet = 0
    while quiet < 5:  # the loop needs some rounds to accept and to close connections
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        quiet = 0 if tasks else quiet + 1


class _Cut(Exception):
    """The fault that resets the connection."""


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    fault: Fault,
    received: bytearray,
) -> None:
    done = 0
    while piece := await reader.read(fault.drip or 1 << 16):
        received += piece
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
    """Resets a connection and discards its unsent bytes."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        linger = b"\x01\0\0\0\0\0\0\0"  # l_onoff 1, l_linger 0: send RST, not FIN
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def every_fault(size: int) -> Iterator[tuple[str, Fault]]:
    """Yields a name and a fault for each way to break each of the first bytes."""
    for at in range(size):
        yield f"cut after {at}", Fault(cut_after=at)
        yield f"byte {at} damaged", Fault(flip_at=at)
        yield f"closed after {at}", Fault(close_after=at)
