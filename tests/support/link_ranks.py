"""Ranks that are threads of the test process, for tests of links.

Rank r belongs to the simulated host hosts[r], and has its own listener. The native core
is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ringjax.config import Config
from ringjax.control.listener import LinkListener
from ringjax.links.factory import LinkDescriptors, LinkFactory
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

SECRET, JOB = b"s" * 32, "0123456789abcdef"
RING = 1 << 14


def host_bytes(ranks: int, ring: int, tile: int) -> tuple[int, int]:
    """Returns simple sizes in place of those of the native core."""
    return 4096 + ranks * tile, 4096 + ranks * tile + ranks * (ranks - 1) * ring


class Ranks:
    """Ranks that are threads; rank r belongs to the host with number hosts[r].

    The rank `without_tls`, if it is given, has RINGJAX_TLS=off.
    """

    def __init__(
        self, hosts: Sequence[int], without_tls: int = -1, **settings: Any
    ) -> None:
        self.size, self.hosts, self._without_tls = len(hosts), hosts, without_tls
        self.config = Config(**{"ring_bytes": RING, "start_timeout": 5.0} | settings)
        self.log: list[str] = []
        self.coordinator = Coordinator(
            SECRET, JOB, np=self.size, on_loss="stop", log=self.log.append
        )
        self.coordinator.start()
        self.pool = ThreadPoolExecutor(2 * self.size)
        self.built: list[LinkDescriptors] = []
        self.listeners: list[LinkListener] = []
        futures = [self.pool.submit(self._factory, rank) for rank in range(self.size)]
        self.factories = [future.result() for future in futures]

    def _factory(self, rank: int) -> LinkFactory:
        config = self.config
        if rank == self._without_tls:
            config = replace(config, tls="off")
        listener = LinkListener(
            SECRET,
            JOB,
            rank=rank,
            size=self.size,
            hosts=["127.0.0.1"],
            log=self.log.append,
            failed=self.log.append,
            tls=config.tls,
        )
        self.listeners.append(listener)
        hello = {
            "rank": rank,
            "size": self.size,
            "hostname": f"host{self.hosts[rank]}",
            "machine": "this",
            "shm": self.config.shm,
            "door": listener.unix_name,
            "addresses": ",".join(listener.addresses),
        }
        where = ",".join(self.coordinator.addresses)
        client = join(JobCredentials(where, SECRET, JOB), rank, hello, 10)
        return LinkFactory(
            rank=rank,
            members=client.members,
            hosts=self.hosts,
            epoch=client.epoch,
            job=JOB,
            secret=SECRET,
            config=config,
            listener=listener,
            loss_monitor=client,
            locate=client.locate,
            host_bytes=host_bytes,
            log=lambda level, text: self.log.append(f"{level}: {text}"),
        )

    def start(
        self, comm: int, ranks: Sequence[int], who: Sequence[int], control: bool
    ) -> list[Future[LinkDescriptors]]:
        return [
            self.pool.submit(
                self.factories[rank].build, comm, ranks, "world", control=control
            )
            for rank in who
        ]

    def build(
        self, comm: int = 0, ranks: Sequence[int] | None = None, control: bool = True
    ) -> list[LinkDescriptors]:
        ranks = range(self.size) if ranks is None else ranks
        futures = self.start(comm, ranks, ranks, control)
        built = [future.result() for future in futures]
        self.built += built
        return built

    def connect(self, low: int, high: int, comm: int = 0) -> list[LinkDescriptors]:
        """Connects two ranks of a communicator of all ranks, as a call would."""
        futures = [
            self.pool.submit(
                self.factories[rank].connect, comm, range(self.size), "world", [peer]
            )
            for rank, peer in ((low, high), (high, low))
        ]
        built = [future.result() for future in futures]
        self.built += built
        return built

    def close(self) -> None:
        for links in self.built:
            links.close()
        for listener in self.listeners:
            listener.close()
            listener.close()  # twice is fine
        for factory in self.factories:
            factory.loss_monitor.close()
        self.coordinator.close()
        self.pool.shutdown()


@pytest.fixture
def world() -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:

        def make(hosts: Sequence[int], **settings: Any) -> Ranks:
            ranks = Ranks(hosts, **settings)
            stack.callback(ranks.close)
            return ranks

        yield make
