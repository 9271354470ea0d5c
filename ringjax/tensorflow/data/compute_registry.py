"""A registry of the dispatchers and workers of TensorFlow's data service.

One process of the compute job runs the registry, a `ComputeService`. All other
processes and the training program use the registry through a `ComputeClient`. Registry
and client prove to each other that they know the key. TensorFlow itself connects
dispatchers, workers and trainers, and does not secure these connections.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ringjax.control import addresses as address
from ringjax.control.connecting import SERVER_RANK, connect_to_server
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.server import JobServer, ServerSession
from ringjax.control.tls import offer_for
from ringjax.errors import StartupError

ServiceAddresses: TypeAlias = Mapping[str, Sequence[tuple[str, int]]]
"""Hosts and ports of the registry, by network interface."""


class ComputeService(JobServer):
    """Registers dispatchers and workers, and replies to questions about them.

    The reply to a question about a dispatcher waits until the dispatcher is registered.

    Args:
        dispatchers: the number of dispatchers.
        workers_per_dispatcher: the number of workers for which a dispatcher waits.
        key: the secret that clients must know.
        hosts: the addresses to listen on; None means all addresses of this host.

    Example:
        >>> service = ComputeService(1, 1, b"key", hosts=["127.0.0.1"])
        >>> client = ComputeClient(service.address_map(), b"key")
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
        self._workers_per_dispatcher = workers_per_dispatcher
        self._dispatcher_addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {}
        self._shut_down = False
        self._questions: list[tuple[ServerSession, str, int]] = []
        hosts = address.of_interfaces() if hosts is None else hosts
        super().__init__(key, derive_job_id(key), hosts=hosts, port=0, log=None)
        self.start()

    def address_map(self) -> ServiceAddresses:
        """Returns the addresses of this service for a `TfDataServiceConfig`."""
        return {
            "all": [pair for text in self.addresses for pair in address.parse(text)]
        }

    def shutdown(self) -> None:
        """Closes the service; clients that wait for the shutdown return."""
        self.close()

    def refusal_of(self, caller: int) -> str:
        """Accepts every client that knows the key."""
        return ""

    def on_message(self, session: ServerSession, message: dict[str, Any]) -> None:
        """Stores a client's report, and replies to the clients that wait for it."""
        ask, number = str(message.get("ask")), message.get("dispatcher", 0)
        if not isinstance(number, int) or not 0 <= number < self._dispatchers:
            text = f"there is no dispatcher {number!r}, there are {self._dispatchers}"
            session.send({"error": text}, last=True)
            return
        if ask == "dispatcher is":
            reported = str(message["where"])
            known = self._dispatcher_addresses.setdefault(number, reported)
            if known != reported:
                text = f"dispatcher {number} is registered already, as {known}"
                session.send({"error": text}, last=True)
                return
        elif ask == "worker is":
            self._workers.setdefault(number, set()).add(int(message["worker"]))
        elif ask == "shut down":
            self._shut_down = True
        self._questions.append((session, ask, number))
        self._answer()

    def on_lost(self, session: ServerSession, why: str) -> None:
        """Drops the questions of a client that has disconnected."""
        self._questions = [each for each in self._questions if each[0] is not session]

    def _answer(self) -> None:
        questions, self._questions = self._questions, []
        for session, ask, number in questions:
            if self._is_ready(ask, number):
                answer = {"where": self._dispatcher_addresses.get(number, "")}
                session.send(answer, last=True)
            else:
                self._questions.append((session, ask, number))

    def _is_ready(self, ask: str, number: int) -> bool:
        if ask == "dispatcher":
            return number in self._dispatcher_addresses
        if ask == "workers":
            return len(self._workers.get(number, ())) >= self._workers_per_dispatcher
        return ask != "end" or self._shut_down


class ComputeClient:
    """A client of a `ComputeService`, which opens a connection for each question.

    Args:
        addresses: the addresses of the service, as in `TfDataServiceConfig`.
        key: the secret of the service.
        verbose: an argument of Horovod without effect.
    """

    def __init__(
        self, addresses: ServiceAddresses, key: bytes, verbose: int = 1
    ) -> None:
        del verbose
        shown = [address.show(*p) for pairs in addresses.values() for p in pairs]
        self._addresses = ",".join(shown)
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Registers the address of a dispatcher."""
        self._ask("dispatcher is", dispatcher_id, 30.0, where=dispatcher_address)

    def wait_for_dispatcher_registration(
        self, dispatcher_id: int, timeout: float
    ) -> str:
        """Waits until a dispatcher is registered, and returns its address.

        Raises:
            TimeoutError: the dispatcher was not registered within `timeout` seconds.
            StartupError: there is no such dispatcher, or no such service.
        """
        return str(self._ask("dispatcher", dispatcher_id, timeout)["where"])

    def register_worker_for_dispatcher(
        self, dispatcher_id: int, worker_id: int
    ) -> None:
        """Registers a worker of a dispatcher."""
        self._ask("worker is", dispatcher_id, 30.0, worker=worker_id)

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float
    ) -> None:
        """Waits until all workers of a dispatcher are registered.

        Raises: as `wait_for_dispatcher_registration`.
        """
        self._ask("workers", dispatcher_id, timeout)

    def shutdown(self) -> None:
        """Ends the compute job."""
        self._ask("shut down", 0, 30.0)

    def wait_for_shutdown(self) -> None:
        """Waits until a client has called `shutdown`, or the service has ended."""
        while self.is_running():
            time.sleep(0.5)

    def is_running(self) -> bool:
        """Returns whether the service runs and no client has called `shutdown`."""
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
        connect_deadline = max(deadline, time.monotonic() + 5.0)
        sock, keys, where = connect_to_server(
            self._addresses, self._key, caller, connect_deadline, ComputeService.name
        )
        with sock:
            opener = keys.opener()
            question = {"ask": ask, "dispatcher": dispatcher, **more}
            sock.sendall(keys.sealer().seal(question))
            while True:
                sock.settimeout(max(deadline - time.monotonic(), 0.01))
                data = _receive(sock, f"{where} has not said {ask!r} of {dispatcher}")
                if not data:
                    raise StartupError(f"{where} has ended")
                for answer in opener.feed(data):
                    if "error" in answer:
                        raise StartupError(f"{where}: {answer['error']}")
                    return answer


def _receive(sock: socket.socket, late: str) -> bytes:
    try:
        return sock.recv(1 << 16)
    except TimeoutError:
        raise TimeoutError(f"{late} in time") from None


def derive_job_id(key: bytes) -> str:
    """Derives the id of the job from its key, so no process has to send the id."""
    return hashlib.sha256(b"ringjax data service" + key).hexdigest()[:16]
