"""A coordinator and its clients, which are threads of the test."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ringjax.control import addresses
from ringjax.control.connecting import SERVER_RANK
from ringjax.control.handshake import HandshakeRequest, Purpose, authenticate
from ringjax.control.sealed_messages import MessageSealer
from ringjax.membership.client import CoordinatorClient
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join
from support.waiting import LONG

SECRET, JOB = b"s" * 32, "0123456789abcdef"
stopping: dict[str, Any] = {"on_loss": "stop"}


class Town:
    """A coordinator and the workers that visit it."""

    def __init__(self, np: int, min_np: int = 1, **more: Any) -> None:
        self.log: list[str] = []
        self.stops = more.get("on_loss") == "stop"
        self.options: dict[str, Any] = {"np": np, "min_np": min_np} | more
        self.coordinator = self.open()
        self.where = ",".join(self.coordinator.addresses)
        self.pool = ThreadPoolExecutor(np + 4)
        self.workers: dict[int, CoordinatorClient] = {}
        self.events: list[tuple[Any, ...]] = []

    def open(self, **more: Any) -> Coordinator:
        coordinator = Coordinator(
            SECRET, JOB, log=self.log.append, **self.options, **more
        )
        coordinator.start()
        return coordinator

    def join(
        self, worker: int, secret: bytes = SECRET, warning: Any = None, **hello: Any
    ) -> CoordinatorClient:
        """Joins the job. In a job that stops at a loss, a rank also sends its size."""
        said = {"size": self.options["np"]} | hello if self.stops else hello
        more = {} if warning is None else {"warning": warning}
        patient = 0.0 if self.stops else LONG
        client = join(
            *(JobCredentials(self.where, secret, JOB), worker, said, LONG),
            elastic_timeout=patient,
            **more,
        )
        self.workers[worker] = client
        return client

    def gather(self, *workers: int) -> list[CoordinatorClient]:
        return list(self.pool.map(self.join, workers))

    def waiting(self) -> set[int]:
        """The connected workers that are not members yet."""
        return set(self.coordinator._membership._newcomers)

    def event(self, kind: str) -> tuple[Any, ...]:
        """Waits for an event of this kind, as a launcher does."""
        while not any(event[0] == kind for event in self.events):
            wakeup = self.coordinator.wakeup
            assert select.select([wakeup], [], [], LONG)[0], self.events
            self.coordinator.clear()
            while not self.coordinator.events.empty():
                self.events.append(self.coordinator.events.get())
        return next(event for event in self.events if event[0] == kind)

    def close(self) -> None:
        self.coordinator.close()
        self.coordinator.close()  # twice is fine
        for worker in self.workers.values():
            worker.close()
            worker.close()
        self.pool.shutdown()


def raw(here: Town, worker: int) -> tuple[socket.socket, MessageSealer]:
    """Connects a worker that has authenticated and sent nothing else."""
    sock = socket.create_connection(addresses.parse(here.where)[0], timeout=LONG)
    hello = HandshakeRequest(JOB, Purpose.RENDEZVOUS, worker, SERVER_RANK)
    return sock, authenticate(sock, SECRET, hello).sealer()


MakeTown = Callable[..., Town]


@pytest.fixture
def town() -> Iterator[MakeTown]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **more: Any) -> Town:
            town = Town(*args, **more)
            stack.callback(town.close)
            return town

        yield make
