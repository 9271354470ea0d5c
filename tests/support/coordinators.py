"""A job whose coordinator and clients are threads of the test process."""

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
STOP_ON_LOSS: dict[str, Any] = {"on_loss": "stop"}


class ThreadJob:
    """A coordinator and the clients of its workers, in one process."""

    def __init__(self, np: int, min_np: int = 1, **more: Any) -> None:
        self.log: list[str] = []
        self.stops_on_loss = more.get("on_loss") == "stop"
        self.options: dict[str, Any] = {"np": np, "min_np": min_np} | more
        self.coordinator = self.start_coordinator()
        self.addresses = ",".join(self.coordinator.addresses)
        self.pool = ThreadPoolExecutor(np + 4)
        self.workers: dict[int, CoordinatorClient] = {}
        self.events: list[tuple[Any, ...]] = []

    def start_coordinator(self, **more: Any) -> Coordinator:
        coordinator = Coordinator(
            SECRET, JOB, log=self.log.append, **self.options, **more
        )
        coordinator.start()
        return coordinator

    def join(
        self, worker: int, secret: bytes = SECRET, warning: Any = None, **hello: Any
    ) -> CoordinatorClient:
        """Joins the job. In a job that stops at a loss, a rank also sends its size."""
        if self.stops_on_loss:
            hello = {"size": self.options["np"]} | hello
        more = {} if warning is None else {"warning": warning}
        client = join(
            *(JobCredentials(self.addresses, secret, JOB), worker, hello, LONG),
            elastic_timeout=0.0 if self.stops_on_loss else LONG,
            **more,
        )
        self.workers[worker] = client
        return client

    def gather(self, *workers: int) -> list[CoordinatorClient]:
        return list(self.pool.map(self.join, workers))

    def newcomers(self) -> set[int]:
        """Returns the connected workers that are not members yet."""
        return set(self.coordinator._membership._newcomers)

    def wait_for_event(self, kind: str) -> tuple[Any, ...]:
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


def connect_raw(job: ThreadJob, worker: int) -> tuple[socket.socket, MessageSealer]:
    """Connects a worker that has authenticated and sent nothing else."""
    sock = socket.create_connection(addresses.parse(job.addresses)[0], timeout=LONG)
    hello = HandshakeRequest(JOB, Purpose.RENDEZVOUS, worker, SERVER_RANK)
    return sock, authenticate(sock, SECRET, hello).sealer()


MakeJob = Callable[..., ThreadJob]


@pytest.fixture
def make_job() -> Iterator[MakeJob]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **more: Any) -> ThreadJob:
            make_job = ThreadJob(*args, **more)
            stack.callback(make_job.close)
            return make_job

        yield make
