"""Ranks that are threads of the test process, for tests of meshes.

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
from ringjax.links.mesh import LinkDescriptors, MeshFactory
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

SECRET, JOB = b"s" * 32, "0123456789abcdef"
RING = 1 << 14
SIZE = 3 * RING  # bytes of shared memory that the core would request


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
        self.meshes: list[LinkDescriptors] = []
        self.listeners: list[LinkListener] = []
        futures = [self.pool.submit(self._factory, rank) for rank in range(self.size)]
        self.factories = [future.result() for future in futures]

    def _factory(self, rank: int) -> MeshFactory:
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
        return MeshFactory(
            rank=rank,
            members=client.members,
            hosts=self.hosts,
            epoch=client.epoch,
            job=JOB,
            secret=SECRET,
            config=config,
            listener=listener,
            loss_monitor=client,
            shm_bytes=lambda ring: 3 * ring,
            segment_bytes=lambda size, tile: size * tile,
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
        meshes = [future.result() for future in futures]
        self.meshes += meshes
        return meshes

    def close(self) -> None:
        for mesh in self.meshes:
            mesh.close()
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
