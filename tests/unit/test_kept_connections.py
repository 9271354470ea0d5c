"""Tests of links that use the control connections of an earlier epoch.

Ranks are threads, see link_ranks.py. Before an epoch, each rank releases its control
connections and announces the epoch, as EpochBuilder does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.link_ranks import JOB, Ranks, world
from support.waiting import LONG, until

from ringjax.control.handshake import Purpose
from ringjax.control.listener import ConnectionKey
from ringjax.errors import PeerLost, Unreachable
from ringjax.links.control_connection import ControlConnection
from ringjax.links.descriptors import LinkDescriptors
from ringjax.links.kept_connections import KeptConnections

__all__ = ["world"]  # a fixture

Inodes = dict[tuple[int, int], int]  # (rank, peer) -> inode of the rank's socket


@dataclass
class EpochMonitor:
    """Makes builds fail once the epoch is revoked. A `LossMonitor`."""

    epoch: int
    revoked: set[int]
    queries: int = 0

    def departed_ranks(self) -> dict[int, str]:
        self.queries += 1
        if self.epoch in self.revoked:
            raise PeerLost(f"epoch {self.epoch} is over")
        return {}


@dataclass
class Epochs:
    """The epochs of ranks that keep their control connections."""

    ranks: Ranks
    links: dict[int, LinkDescriptors] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    monitors: list[EpochMonitor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = [KeptConnections() for _ in range(self.ranks.size)]

    def begin(self, rank: int, epoch: int) -> None:
        """Moves a rank to an epoch, with the connections of the epoch before."""
        factory = self.ranks.factories[rank]
        if (links := self.links.pop(rank, None)) is not None:
            for peer, fd in links.control:
                sock = socket.socket(fileno=fd)
                self.kept[rank].add(factory.control_connection(peer, sock))
            links.control = []
            links.close()
        self.kept[rank].announce(epoch)
        factory.listener.discard_before(epoch)

    def build(self, rank: int, epoch: int) -> Future[LinkDescriptors]:
        first = self.ranks.factories[rank]
        self.monitors.append(EpochMonitor(epoch, self.revoked))
        factory = replace(
            first,
            epoch=epoch,
            # The coordinator of a static job knows only epoch 0.
            locate=lambda ranks, seconds, what, _: first.locate(
                ranks, seconds, what, 0
            ),
            kept=self.kept[rank],
            loss_monitor=self.monitors[-1],
        )
        everybody = range(self.ranks.size)
        return self.ranks.pool.submit(
            factory.build, 0, everybody, "world", control=True
        )

    def finish(self, builds: Sequence[tuple[int, Future[LinkDescriptors]]]) -> Inodes:
        for rank, future in builds:
            self.links[rank] = future.result(LONG)
        return {
            (rank, peer): os.fstat(fd).st_ino
            for rank, _ in builds
            for peer, fd in self.links[rank].control
        }

    def run(self, epoch: int) -> Inodes:
        """Lets all ranks begin and build an epoch."""
        everybody = range(self.ranks.size)
        for rank in everybody:
            self.begin(rank, epoch)
        return self.finish([(rank, self.build(rank, epoch)) for rank in everybody])

    def close(self) -> None:
        for links in self.links.values():
            links.close()
        for kept in self.kept:
            kept.close()


@pytest.fixture
def epochs(world: Callable[..., Ranks]) -> Iterator[Callable[..., Epochs]]:
    found: list[Epochs] = []

    def make(hosts: Sequence[int], **settings: Any) -> Epochs:
        found.append(Epochs(world(hosts, tile_bytes=0, **settings)))
        return found[-1]

    yield make
    for each in found:
        each.close()


@pytest.mark.parametrize(
    "hosts", [(0, 0), (0, 0, 0), (0,) * 5, (0, 1), (0, 0, 1, 1, 0), tuple(range(9))]
)
def test_all_connections_are_kept(
    epochs: Callable[..., Epochs], hosts: tuple[int, ...]
) -> None:
    job = epochs(hosts)
    first = job.run(1)
    assert job.run(2) == first
    assert job.run(7) == first
    for rank, links in job.links.items():
        assert (links.memory is not None) == (hosts.count(hosts[rank]) > 1)
    assert job.ranks.log == []


def test_failed_attempts_give_the_connections_back(
    epochs: Callable[..., Epochs],
) -> None:
    job = epochs((0, 0, 1, 0, 1))
    first = job.run(1)
    for rank in (0, 1, 2, 4):  # rank 3 leaves epoch 2 out
        job.begin(rank, 2)
    builds = [job.build(rank, 2) for rank in (0, 1, 2, 4)]
    job.revoked.add(2)
    for future in builds:
        with pytest.raises(PeerLost, match="epoch 2 is over"):
            future.result(LONG)
    assert job.run(3) == first


def test_an_epoch_that_only_some_ranks_have_built(
    epochs: Callable[..., Epochs],
) -> None:
    job = epochs((0,) * 5)
    first = job.run(1)
    for rank in range(5):
        job.begin(rank, 2)
    # Rank 4 has announced the epoch, so that the others can build it. It builds nothing
    # and never receives its memory.
    job.finish([(rank, job.build(rank, 2)) for rank in range(4)])
    assert job.run(3) == first


@pytest.mark.parametrize("announced", [(2, 4), (4,)])
def test_a_peer_that_is_ahead(
    epochs: Callable[..., Epochs], announced: tuple[int, ...]
) -> None:
    job = epochs((0, 0))
    first = job.run(1)
    for epoch in announced:
        job.begin(0, epoch)
    # Rank 1 finds the end of epoch 2 while it waits for the memory, or even before.
    job.begin(1, 2)
    future = job.build(1, 2)
    until(lambda: job.monitors[-1].queries > 2)  # it waits
    job.revoked.add(2)
    with pytest.raises(PeerLost, match="epoch 2 is over"):
        future.result(LONG)
    job.begin(1, 4)
    assert job.finish([(rank, job.build(rank, 4)) for rank in (0, 1)]) == first


def test_a_peer_that_does_not_begin_the_epoch_is_named(
    epochs: Callable[..., Epochs],
) -> None:
    job = epochs((0, 0, 0), start_timeout=1.0)
    job.run(1)
    for rank in (0, 1):
        job.begin(rank, 2)
    future = job.build(1, 2)
    with pytest.raises(Unreachable, match=r"rank 2 within 1 s .*in another epoch"):
        future.result(LONG)


def test_a_connection_that_one_rank_has_closed_is_made_anew(
    epochs: Callable[..., Epochs],
) -> None:
    job = epochs((0, 0, 0, 1))
    first = job.run(1)
    for rank, peer in ((2, 1), (0, 3)):
        job.begin(rank, 1)  # releases the connections
        connection = job.kept[rank].take(peer)
        assert connection is not None
        connection.close()
    second = job.run(2)
    assert second.keys() == first.keys()
    changed = {pair for pair in first if first[pair] != second[pair]}
    assert changed == {(1, 2), (2, 1), (0, 3), (3, 0)}


@pytest.mark.parametrize("liar", [0, 1])
def test_a_connection_whose_end_has_another_secret_is_not_kept(
    epochs: Callable[..., Epochs], liar: int
) -> None:
    job = epochs((0, 0))
    first = job.run(1)
    job.begin(liar, 1)  # releases the connection
    connection = job.kept[liar].take(1 - liar)
    assert connection is not None
    sock = socket.socket(fileno=connection.detach())
    false = ControlConnection(sock, b"f" * 32, JOB, liar, 1 - liar)
    job.kept[liar].add(false)
    second = job.run(2)
    assert not set(first.values()) & set(second.values())
    assert all("connects to rank" in line for line in job.ranks.log)
    assert job.ranks.log


def test_a_call_that_the_other_end_has_never_accepted(
    epochs: Callable[..., Epochs],
) -> None:
    job = epochs((0, 0), shm=False)
    job.finish([(1, job.build(1, 1))])  # rank 1 calls, and waits for nothing
    until(
        lambda: job.ranks.factories[0].listener.has(
            ConnectionKey(1, 0, Purpose.CONTROL, 0, 1)
        )
    )
    job.run(2)


def test_connections_that_an_epoch_does_not_use_are_closed(
    epochs: Callable[..., Epochs],
) -> None:
    job = epochs((0, 0))
    job.run(1)
    here, there = socket.socketpair()
    with there:
        job.kept[0].add(ControlConnection(here, b"s" * 32, JOB, 0, 77))
        job.run(2)
        there.settimeout(LONG)
        while there.recv(4096):
            pass
    assert job.kept[0].take(77) is None
