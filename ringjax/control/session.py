"""A rank's connection to the rendezvous: join it, learn the membership, stay in touch.

The other end is rendezvous.py. The connection stays open as long as the rank belongs to
the job; it carries no tensors, and losing it does not end a job that has come together.
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.control import addresses as address
from ringjax.control.handshake import LIMIT, Introduction, Purpose, introduce
from ringjax.control.sealing import Keys
from ringjax.control.tls import offer
from ringjax.errors import AuthenticationError, RingjaxError, Stalled, StartupError

SERVER_RANK = -1
GRACE = 2.0  # seconds to wait longer than the server, which can say who is missing


@dataclass(frozen=True, slots=True)
class Member:
    """A rank as all others know it.

    Attributes:
        seen: the address from which it reached the rendezvous; it is known to work.
        hello: what it said about itself when it joined.
        worker: in an elastic job, the number of its process, which is never used again.
    """

    rank: int
    seen: str
    hello: dict[str, Any]
    worker: int = -1


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a sentence: "rank 3", or "ranks 1, 2, 5 and 40 more"."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


class News:
    """One line about a rank that waits for long, while its job comes together.

    Args:
        say: shows it.
        seconds: how long is long; 0: nothing is said.
        limit: when waiting ends.

    Example:
        >>> news = News(print, 0.0, 120.0)
        >>> news.nobody("no answer")
        >>> news = News(print, 1e-9, 120.0)
        >>> news.missing([1, 3], 4)
        has waited 1e-09 s in init for ranks 1, 3 of 4; it waits up to 120 s
    """

    def __init__(
        self, say: Callable[[str], None], seconds: float, limit: float
    ) -> None:
        self._say, self._seconds, self._limit = say, seconds, limit
        self._spoken = seconds <= 0
        self._due = time.monotonic() + seconds

    @property
    def due(self) -> float:
        """When to say something; never, if that has been done."""
        return math.inf if self._spoken else self._due

    def missing(self, ranks: Sequence[int], size: int) -> None:
        """These have not joined."""
        self._tell(f"for {ranks_text(ranks)} of {size}")

    def nobody(self, why: str) -> None:
        """There is no rendezvous yet; said if it is time."""
        if time.monotonic() >= self.due:
            self._tell(f"for the rendezvous of its job ({why})")

    def _tell(self, what: str) -> None:
        self._spoken = True
        up_to = f"it waits up to {self._limit:g} s"
        self._say(f"has waited {self._seconds:g} s in init {what}; {up_to}")


SILENT = News(lambda text: None, 0.0, 0.0)


def join(
    addresses: str,
    secret: bytes,
    job: str,
    hello: dict[str, Any],
    timeout: float,
    *,
    patient: bool = False,
    tls: str = "auto",
    news: News = SILENT,
) -> Session:
    """Joins the job's rendezvous and waits until all ranks have.

    Args:
        addresses: "host:port,...", tried in turn until one answers.
        hello: what the others shall know; "rank" and "size" must be in it.
        timeout: seconds for all of it.
        patient: a server that cannot prove itself may be a stranger on the port that
            the right one will take soon, so keep trying. Otherwise that is an error.
        tls: whether the session is encrypted, as in RINGJAX_TLS.
        news: of a wait that is long.

    Raises:
        StartupError: nobody answers, ranks are missing, or this one is refused.
        AuthenticationError: the server does not know the secret.
    """
    deadline = time.monotonic() + timeout
    pause = 0.02
    while True:
        try:
            return knock(addresses, secret, job, hello, deadline, tls, news)
        except OSError as error:
            hint = ""
            if patient and isinstance(error, _Unknown):
                hint = "; set MASTER_ADDR to a name or address that this host knows"
            why: Exception = StartupError(f"{error}{hint}")
        except AuthenticationError as error:
            if not patient:
                raise
            why = error
        if time.monotonic() + pause >= deadline:
            raise type(why)(
                f"rank {hello['rank']} could not join its job within {timeout:g} s: "
                f"{why}"
            )
        news.nobody(str(why))
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def knock(
    addresses: str,
    secret: bytes,
    job: str,
    hello: dict[str, Any],
    deadline: float,
    tls: str = "auto",
    news: News = SILENT,
) -> Session:
    """Tries each address once; otherwise like `join`.

    Raises:
        OSError: nobody answers, or the server went away; later it may be there.
    """
    introduction = Introduction(
        job, Purpose.RENDEZVOUS, int(hello["rank"]), SERVER_RANK, tls=offer(tls)
    )
    sock, keys, where = reach(addresses, secret, introduction, deadline)
    session = Session(sock, keys, introduction.caller)
    try:
        session.enter(int(hello["size"]), hello, deadline + GRACE, news)
    except ConnectionError as error:  # it ends, and perhaps another one begins
        session.close()
        raise OSError(f"{where}: {error}") from error
    except BaseException:
        session.close()
        raise
    return session


class _Unknown(OSError):
    """The name of a host means nothing here, or not yet."""


def reach(
    addresses: str,
    secret: bytes,
    introduction: Introduction,
    deadline: float,
    server: str = "rendezvous",
) -> tuple[socket.socket, Keys, str]:
    """Connects to the first address where a server proves itself; tries each once.

    Args:
        server: what it is called in errors.

    Returns:
        The socket, its keys, and where it leads to.

    Raises:
        AuthenticationError: what answers cannot prove itself.
        StartupError: this host has no loopback interface that is up.
        OSError: nobody answers.
    """
    stranger, absent = None, None
    candidates = address.parse(addresses)
    # Something else that listens there and says nothing must not use up all the time.
    share = (deadline - time.monotonic()) / (2 * len(candidates))
    limit = min(LIMIT, max(0.1, share))
    for host, port in candidates:
        where = f"the {server} at {address.show(host, port)}"
        try:
            return *_connect((host, port), secret, introduction, limit), where
        except AuthenticationError as error:
            stranger = AuthenticationError(f"{where} {error}")
        except OSError as error:
            if error.errno == errno.ENETUNREACH and address.is_loopback(host):
                raise StartupError(
                    f"{where}: {error.strerror}: the loopback interface of this host "
                    "is down; bring it up: ip link set lo up"
                ) from None
            absent = OSError(f"{where}: {error.strerror or error}")
            if isinstance(error, socket.gaierror):
                absent = _Unknown(f"{where}: {error.strerror}")
    raise stranger or absent or OSError("no address")


def _connect(
    where: tuple[str, int], secret: bytes, introduction: Introduction, limit: float
) -> tuple[socket.socket, Keys]:
    sock = socket.create_connection(where, timeout=limit)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock, introduce(sock, secret, introduction, limit)
    except BaseException:
        sock.close()
        raise


def watch(sock: socket.socket, seconds: float) -> None:
    """Has the kernel end a TCP connection whose other end is silent for so long."""
    interval = max(int(seconds / 3), 1)
    options = {
        socket.TCP_USER_TIMEOUT: max(int(1000 * seconds), 1),
        socket.TCP_KEEPIDLE: interval,
        socket.TCP_KEEPINTVL: interval,
        socket.TCP_KEEPCNT: 3,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Session:
    """This rank's place in the job. Made by `join`; usable from any thread.

    Attributes:
        members: all ranks, in order.
        epoch: how many memberships this rendezvous has seen before this one.
    """

    def __init__(self, sock: socket.socket, keys: Keys, rank: int) -> None:
        self.rank, self.epoch = rank, 0
        self.members: list[Member] = []
        self._sock: socket.socket | None = sock
        self._sealer, self._opener = keys.sealer(), keys.opener()
        self._queue: list[dict[str, Any]] = []
        self._gone: dict[int, str] = {}
        self._exchanges = 0
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def enter(
        self,
        size: int,
        hello: dict[str, Any],
        deadline: float,
        news: News = SILENT,
    ) -> None:
        """Says hello and waits for the membership."""
        self._send({"type": "hello", "size": size, "hello": hello}, LIMIT)
        message = self._receive(min(deadline, news.due))
        if message is None and news.due < deadline:
            self._send({"type": "missing"}, LIMIT)  # answered to the first who asks
            message = self._receive(deadline)
            if message is not None and message.get("type") == "missing":
                news.missing([int(rank) for rank in message["ranks"]], size)
                message = self._receive(deadline)
        if message is None:
            raise StartupError(f"rank {self.rank} got no membership in time")
        if message.get("type") != "members":
            raise StartupError(str(message.get("text", "refused by the rendezvous")))
        self.epoch = int(message["epoch"])
        self.members = [
            Member(int(m["rank"]), str(m["seen"]), dict(m["hello"]))
            for m in message["members"]
        ]

    def exchange(self, value: Any, seconds: float, what: str) -> list[Any]:
        """Gives every rank the JSON values of all ranks, in the order of the ranks.

        Every rank makes the same exchanges in the same order.

        Args:
            what: names the exchange in errors.

        Raises:
            Stalled: not all ranks took part in time; the text names them.
            RingjaxError: the rendezvous is gone.
        """
        with self._receiving:
            number, self._exchanges = self._exchanges, self._exchanges + 1
            message = {"type": "exchange", "number": number, "value": value}
            try:
                self._send(message | {"seconds": seconds}, LIMIT)
                reply = self._reply(number, time.monotonic() + seconds + GRACE)
            except OSError as error:
                raise RingjaxError(
                    f"{what}: the rendezvous is gone: {error}"
                ) from error
        if reply is None:
            raise Stalled(f"{what}: no answer from the rendezvous in {seconds:g} s")
        if reply["type"] == "broken":
            text = f"{what}: {reply.get('text')} (waited up to {seconds:g} s)"
            raise Stalled(text, reply.get("missing", ()))
        return list(reply["values"])

    def _reply(self, number: int, deadline: float) -> dict[str, Any] | None:
        while (message := self._receive(deadline)) is not None:
            if message.get("number") == number:
                return message
            self._note(message)
        return None

    def gone(self) -> dict[int, str]:
        """The ranks known to have gone, and why. Does not wait."""
        if self._receiving.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, AuthenticationError):
                    while (message := self._receive(0.0)) is not None:
                        self._note(message)
            finally:
                self._receiving.release()
        return dict(self._gone)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("type") == "gone":
            for rank, text in message["ranks"]:
                self._gone.setdefault(int(rank), str(text))

    def report_failure(self, text: str) -> None:
        """Tells the launcher why this rank goes down. Never raises or waits long."""
        with contextlib.suppress(OSError):
            self._send({"type": "failure", "text": text[:4096]}, 0.5)

    def leave(self) -> None:
        """Tells the rendezvous that this rank leaves in good order."""
        with contextlib.suppress(OSError):
            self._send({"type": "leave"}, 0.5)

    def close(self) -> None:
        """Closes the connection. May be called twice."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _send(self, message: dict[str, Any], seconds: float) -> None:
        if not self._sending.acquire(timeout=seconds):
            raise TimeoutError("the connection is busy")
        try:
            if self._sock is None:
                raise ConnectionAbortedError("the session is closed")
            self._sock.settimeout(seconds)
            self._sock.sendall(self._sealer.seal(message))
        finally:
            self._sending.release()

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None if there is none until then."""
        while not self._queue:
            if self._sock is None:
                raise ConnectionAbortedError("the session is closed")
            self._sock.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                piece = self._sock.recv(1 << 16)
            except (BlockingIOError, TimeoutError):
                return None
            if not piece:
                raise ConnectionResetError("the rendezvous closed the connection")
            self._queue += self._opener.feed(piece)
        return self._queue.pop(0)
