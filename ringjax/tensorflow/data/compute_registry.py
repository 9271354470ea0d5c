"""Where the dispatchers of a data service are, and when their workers are there.

One process of the compute job has a `ComputeService`; all others, and the training
program, ask it through a `ComputeClient`. Both prove that they know the key. What
TensorFlow itself sends between dispatchers, workers and trainers is not secured.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringjax.control import addresses as address
from ringjax.control.connecting import SERVER_RANK, connect_to_server
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.server import JobServer, ServerSession
from ringjax.control.tls import offer_for
from ringjax.errors import StartupError

ServiceAddresses = Mapping[str, Sequence[tuple[str, int]]]


class ComputeService(JobServer):
    """Remembers what has been registered, and answers when what is asked for is there.

    Args:
        dispatchers: how many there will be.
        workers_per_dispatcher: how many workers each of them waits for.
        key: the secret that clients must know.
        hosts: the addresses to listen on; None: all of this host.

    Example:
        >>> service = ComputeService(1, 1, b"key", hosts=["127.0.0.1"])
        >>> client = ComputeClient(service.places(), b"key")
        >>> client.register_dispatcher(0, "grpc://here:1")
        >>> client.wait_for_dispatcher_registration(0, 5)
        'grpc://here:1'
        >>> client.shutdown()
        >>> client.wait_for_shutdown()
        >>> service.shutdown()
        >>> client.is_running()
        False
    """

    name = "data service"

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self._dispatchers = dispatchers
        self._workers_wanted = workers_per_dispatcher
        self._where: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {}
        self._over = False
        self._waiting: list[tuple[ServerSession, str, int]] = []
        hosts = address.of_interfaces() if hosts is None else hosts
        super().__init__(key, derive_job_id(key), hosts=hosts, port=0, log=None)
        self.start()

    def places(self) -> ServiceAddresses:
        """Where clients find it, as a `TfDataServiceConfig` has it."""
        found = [one for text in self.addresses for one in address.parse(text)]
        return {"all": found}

    def shutdown(self) -> None:
        """Ends it, and with it all who wait for its end."""
        self.close()

    def refusal_of(self, caller: int) -> str:
        """Whoever knows the key may come."""
        return ""

    def on_message(self, session: ServerSession, message: dict[str, Any]) -> None:
        """Notes what is told, and answers what can be answered now."""
        ask, number = str(message.get("ask")), message.get("dispatcher", 0)
        if not isinstance(number, int) or not 0 <= number < self._dispatchers:
            text = f"there is no dispatcher {number!r}, there are {self._dispatchers}"
            session.send({"error": text}, last=True)
            return
        if ask == "dispatcher is":
            known = self._where.setdefault(number, str(message["where"]))
            if known != message["where"]:
                text = f"dispatcher {number} is registered already, as {known}"
                session.send({"error": text}, last=True)
                return
        elif ask == "worker is":
            self._workers.setdefault(number, set()).add(int(message["worker"]))
        elif ask == "shut down":
            self._over = True
        self._waiting.append((session, ask, number))
        self._answer()

    def on_lost(self, session: ServerSession, why: str) -> None:
        """It waits no more."""
        self._waiting = [one for one in self._waiting if one[0] is not session]

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for session, ask, number in waiting:
            if self._is_so(ask, number):
                session.send({"where": self._where.get(number, "")}, last=True)
            else:
                self._waiting.append((session, ask, number))

    def _is_so(self, ask: str, number: int) -> bool:
        if ask == "dispatcher":
            return number in self._where
        if ask == "workers":
            return len(self._workers.get(number, ())) >= self._workers_wanted
        return ask != "end" or self._over


class ComputeClient:
    """Asks a `ComputeService`; each question is a connection of its own.

    Args:
        addresses: where it is, as `TfDataServiceConfig` has it.
        key: its secret.
        verbose: Horovod's; accepted and ignored.
    """

    def __init__(
        self, addresses: ServiceAddresses, key: bytes, verbose: int = 1
    ) -> None:
        del verbose
        every = [address.show(*one) for places in addresses.values() for one in places]
        self._addresses = ",".join(every)
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Says where a dispatcher is."""
        self._ask("dispatcher is", dispatcher_id, 30.0, where=dispatcher_address)

    def wait_for_dispatcher_registration(
        self, dispatcher_id: int, timeout: float
    ) -> str:
        """Where a dispatcher is, once it is there.

        Raises:
            TimeoutError: it is not, in so many seconds.
            StartupError: there is no such dispatcher, or no such service.
        """
        return str(self._ask("dispatcher", dispatcher_id, timeout)["where"])

    def register_worker_for_dispatcher(
        self, dispatcher_id: int, worker_id: int
    ) -> None:
        """Says that a worker is there."""
        self._ask("worker is", dispatcher_id, 30.0, worker=worker_id)

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float
    ) -> None:
        """Returns when all workers of a dispatcher are there; Raises as the others."""
        self._ask("workers", dispatcher_id, timeout)

    def shutdown(self) -> None:
        """Lets the compute job end."""
        self._ask("shut down", 0, 30.0)

    def wait_for_shutdown(self) -> None:
        """Returns when somebody has called `shutdown`, or the service is gone."""
        while self.is_running():
            time.sleep(0.5)

    def is_running(self) -> bool:
        """Whether nobody has called `shutdown`, and the service is there."""
        try:
            self._ask("end", 0, 0.5)
        except TimeoutError:
            return True
        except (StartupError, OSError):
            return False
        return False

    def _ask(
        self, ask: str, dispatcher: int, timeout: float, **more: Any
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        caller = HandshakeRequest(
            derive_job_id(self._key),
            Purpose.RENDEZVOUS,
            0,
            SERVER_RANK,
            tls=offer_for("auto"),
        )
        reached = max(deadline, time.monotonic() + 5.0)
        sock, keys, where = connect_to_server(
            self._addresses, self._key, caller, reached, ComputeService.name
        )
        with sock:
            opener = keys.opener()
            question = {"ask": ask, "dispatcher": dispatcher, **more}
            sock.sendall(keys.sealer().seal(question))
            while True:
                sock.settimeout(max(deadline - time.monotonic(), 0.01))
                piece = _received(sock, f"{where} has not said {ask!r} of {dispatcher}")
                if not piece:
                    raise StartupError(f"{where} has ended")
                for answer in opener.feed(piece):
                    if "error" in answer:
                        raise StartupError(f"{where}: {answer['error']}")
                    return answer


def _received(sock: socket.socket, late: str) -> bytes:
    try:
        return sock.recv(1 << 16)
    except TimeoutError:
        raise TimeoutError(f"{late} in time") from None


def derive_job_id(key: bytes) -> str:
    """A number for those who have this key."""
    return hashlib.sha256(b"ringjax data service" + key).hexdigest()[:16]
