"""Connects each pair of a communicator's ranks in the fastest way.

Two ranks of a host share memory. They send a memfd of fixed size and their eventfds
(*doorbells*) over a unix socket, after a check that both processes have the same user.
Other pairs, and pairs without available shared memory, use several TCP sockets. Every
connection is authenticated (control/handshake.py). The result is a set of descriptors
for the native core; this module moves no tensors.

The higher rank of a pair connects to the `LinkListener` of the lower rank, and the
lower rank creates the shared memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

from ringjax import failpoints
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control import open_files
from ringjax.control.handshake import (
    HANDSHAKE_TIMEOUT,
    HandshakeRequest,
    Purpose,
    authenticate,
)
from ringjax.control.listener import ConnectionKey, LinkListener
from ringjax.control.member import Member, ranks_text
from ringjax.control.open_files import is_shortage
from ringjax.control.tls import TlsOffer, offer_for
from ringjax.control.unix_peer import peer_pid, peer_uid
from ringjax.errors import AuthenticationError, OutOfDescriptors, PeerLost, Unreachable
from ringjax.links import shared_memory, sizes, standing
from ringjax.links.descriptors import LinkDescriptors as LinkDescriptors
from ringjax.links.pair import PairSetup, receive_early

_CONNECT_TIMEOUT = 2.0  # seconds for one attempt to connect to an address
_KEEPALIVE = 60  # seconds between two probes on an idle data connection
# Seconds after which a rank that refuses every connection counts as dead. Each rank
# listens before it joins, so a refusal means that its process has probably ended.
_REFUSED_TIMEOUT = 3.0


class LossMonitor(Protocol):
    """Reports lost ranks. A mesh queries the monitor repeatedly while connecting."""

    def departed_ranks(self) -> dict[int, str]:
        """Returns the lost ranks and the reasons. An exception makes `build` fail."""


@dataclass(frozen=True)
class MeshFactory:
    """Connects the ranks of an epoch, for one communicator after another.

    Attributes:
        rank: this rank in the world.
        members: the members of the epoch, by rank.
        hosts: the index of the host of each world rank.
        shm_bytes: computes the bytes of a pair's shared memory from the bytes of one
            ring buffer.
        segment_bytes: computes the bytes of a shared segment from the number of ranks
            and the bytes of a tile.
        log: called with a level, such as "warning", and a sentence.
    """

    rank: int
    members: Sequence[Member]
    hosts: Sequence[int]
    epoch: int
    job: str
    secret: bytes = field(repr=False)
    config: Config
    listener: LinkListener
    loss_monitor: LossMonitor
    shm_bytes: Callable[[int], int]
    segment_bytes: Callable[[int, int], int]
    log: Callable[[str, str], None]

    def build(
        self, comm: int, ranks: Sequence[int], what: str, *, control: bool = False
    ) -> LinkDescriptors:
        """Connects this rank to all other `ranks`, which must call this method, too.

        Args:
            comm: the id of the communicator, equal on all ranks.
            ranks: the world ranks of the communicator, in order, including this rank.
            what: the name of the communicator in errors.
            control: whether the result contains control connections, to the neighbours
                of this rank in the standing graph (standing.py).

        Raises:
            Unreachable: a peer could not be reached within the start timeout.
            PeerLost: a peer is lost.
            OutOfDescriptors: the limit of open files is too low.
        """
        try:
            builder = _MeshBuilder(self, comm, ranks, what, control)
            try:
                builder.connect_to_lower()
                failpoints.passing("mesh.called")
                builder.send_memory()
                builder.receive_memory()
                builder.receive_doorbells()
                builder.share_segment()
                failpoints.passing("mesh.shared")
                return builder.take_descriptors()
            finally:
                builder.close()
        except OSError as error:
            if not is_shortage(error):
                raise
            raise OutOfDescriptors(
                f"{what}: rank {self.rank} could not be connected with the others: "
                f"{error}: {open_files.limit_text()}"
            ) from error


class _MeshBuilder:
    """Builds the mesh of one communicator, in five phases.

    No phase can deadlock: a rank waits only for peers that wait for no other rank.
    """

    def __init__(
        self,
        factory: MeshFactory,
        comm: int,
        ranks: Sequence[int],
        what: str,
        control: bool,
    ) -> None:
        self.factory, self.comm, self.ranks, self.what = factory, comm, ranks, what
        self.watched: set[int] = set()
        if control:
            hosts = [factory.hosts[rank] for rank in ranks]
            neighbours = standing.neighbours(list(ranks).index(factory.rank), hosts)
            self.watched = {ranks[i] for i in neighbours}
        self.deadline = time.monotonic() + factory.config.start_timeout
        self.pairs = [self._pair(r) for r in sorted(ranks) if r != factory.rank]
        open_files.require(self._descriptors(), f"{what}: rank {factory.rank}")
        # A descriptor is in flight after it was sent over a unix socket, and before it
        # is received. The kernel counts the descriptors in flight of all processes of a
        # user, and compares the count with the sender's limit of open files.
        open_files.raise_limit(2 * sum(pair.shared for pair in self.pairs) ** 2)
        self.mesh = LinkDescriptors(
            doorbell=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        )
        near = 1 + sum(pair.local for pair in self.pairs)
        self.ring = sizes.ring_bytes(factory.config.ring_bytes, near, factory.shm_bytes)
        self.size = factory.shm_bytes(self.ring)
        self.lower = [p for p in self.pairs if p.rank < factory.rank]
        self.higher = [p for p in self.pairs if p.rank > factory.rank]
        self.segment = -1
        self.tile = 0

    def _descriptors(self) -> int:
        """Returns the largest number of descriptors that are open at the same time."""
        # A pair with shared memory has four descriptors: the connection, the memory,
        # and the doorbell of the peer twice (the second is for the shared segment).
        tcp = 1 + self.factory.config.tcp_streams
        return 2 + sum(4 if pair.shared else tcp for pair in self.pairs)

    def _pair(self, rank: int) -> PairSetup:
        factory, own = self.factory, self.factory.rank
        local = factory.hosts[rank] == factory.hosts[own]
        both = all(factory.members[r].hello.get("shm") for r in (rank, own))
        return PairSetup(rank, local=local, shm=both, watched=rank in self.watched)

    # Phase 1: connect to every lower rank, and try again until all have replied.

    def connect_to_lower(self) -> None:
        # Begin with the nearest rank, so that not all ranks connect to rank 0 at the
        # same time.
        self._connect_all(self.lower[::-1])

    def _connect_all(self, pairs: Sequence[PairSetup]) -> None:
        waiting = {pair.rank: pair for pair in pairs}
        refused_since: dict[int, float] = {}
        why: dict[int, str] = {}
        while waiting:
            for rank, pair in list(waiting.items()):
                try:
                    self._connect_pair(pair)
                except (OSError, AuthenticationError) as error:
                    if is_shortage(error):
                        raise
                    why[rank], now = str(error), time.monotonic()
                    if not isinstance(error, ConnectionRefusedError):
                        refused_since.pop(rank, None)
                    elif now - refused_since.setdefault(rank, now) > _REFUSED_TIMEOUT:
                        self._fail({rank: f"{why[rank]}, the process is gone"})
                else:
                    del waiting[rank]
            if waiting:
                self._check(lambda: {r: why[r] for r in waiting})
                time.sleep(0.02)

    def _connect_pair(self, pair: PairSetup) -> None:
        if pair.needs_control and pair.control is None:
            pair.control = self._connect(pair, Purpose.CONTROL, 0)
        while not pair.shared and len(pair.data) < self.factory.config.tcp_streams:
            sock = self._connect(pair, Purpose.DATA, len(pair.data))
            pair.data.append(sock)

    def _connect(self, pair: PairSetup, purpose: Purpose, stream: int) -> socket.socket:
        factory = self.factory
        tls_offer = offer_for(factory.config.tls)
        request = HandshakeRequest(
            factory.job,
            purpose,
            factory.rank,
            pair.rank,
            factory.epoch,
            self.comm,
            stream,
        )
        errors: list[Exception] = []
        for where in self._addresses_of(pair, purpose):
            sock = None
            try:
                left = max(0.05, self.deadline - time.monotonic())
                sock = address.connect(where, min(_CONNECT_TIMEOUT, left))
                is_unix = sock.family == socket.AF_UNIX
                if is_unix and peer_uid(sock) != os.geteuid():
                    raise AuthenticationError("it belongs to another user")
                limit = min(HANDSHAKE_TIMEOUT, left)
                sent = replace(request, tls=TlsOffer.NONE if is_unix else tls_offer)
                pair.keys[sock] = authenticate(sock, factory.secret, sent, limit).link
                self._set_options(sock, purpose)
            except (OSError, AuthenticationError) as error:
                if sock is not None:
                    sock.close()
                errors.append(error)
            else:
                return sock
        # A refused connection explains less than any other error, so sort it last.
        errors.sort(key=lambda error: isinstance(error, ConnectionRefusedError))
        raise errors[0] if errors else OSError("it gave no address")

    def _addresses_of(
        self, pair: PairSetup, purpose: Purpose
    ) -> list[str | tuple[str, int]]:
        """Returns the addresses of a peer; the address to try first comes first."""
        member = self.factory.members[pair.rank]
        if pair.local and purpose == Purpose.CONTROL:
            return ["\0" + str(member.hello["door"])]
        found = address.parse(str(member.hello["addresses"]))
        own = self.factory.members[self.factory.rank].hello
        near = own.get("machine") == member.hello.get("machine")
        if not near:
            found = [a for a in found if not address.is_loopback(a[0])] or found
        found.sort(
            key=lambda a: (near != address.is_loopback(a[0]), a[0] != member.seen)
        )
        return list(found)

    # Phase 2: the lower rank of a pair on one host creates the shared memory, and sends
    # the memfd and its own doorbell.

    def send_memory(self) -> None:
        for pair in self.higher:
            if pair.needs_control:
                pair.control = self._accept(pair, Purpose.CONTROL, 0)
        shared = [pair for pair in self.higher if pair.shared]
        try:
            free = shared_memory.available()
            for pair in shared:
                pair.memory = shared_memory.create(self.size, free)
                free -= self.size
        except OSError as error:
            if is_shortage(error):
                raise
            self.factory.log(
                "warning",
                f"{self.what}: {len(shared)} x {self.size} = "
                f"{len(shared) * self.size} bytes of shared memory cannot be had "
                f"({error.strerror}): using TCP on this host, which is slower",
            )
            for pair in shared:
                pair.shared = False
                if pair.memory >= 0:
                    os.close(pair.memory)
                    pair.memory = -1
        # Begin with the highest rank, which sends nothing in this phase, so it receives
        # immediately, and few descriptors are in flight.
        for pair in reversed(shared):
            fds = [pair.memory, self.mesh.doorbell] if pair.shared else []
            self._send(pair, self.size if pair.shared else 0, fds)

    # Phase 3: the higher rank receives the memfd, and sends its own doorbell.

    def receive_memory(self) -> None:
        for pair in self.lower:
            if not pair.shared:
                continue
            size, fds = self._receive(pair, 2)
            if size == 0 and not fds:
                pair.shared = False
                self._connect_all([pair])  # opens the TCP sockets for data
                continue
            if len(fds) == 2:
                pair.memory, pair.doorbell = fds
            else:
                for fd in fds:
                    os.close(fd)
            if pair.memory < 0 or not shared_memory.is_valid(pair.memory, self.size):
                self._fail(
                    {pair.rank: "it offered memory of another size, or unsealed"}
                )
            self._send(pair, self.size, [self.mesh.doorbell])

    # Phase 4: the lower rank receives the doorbells of the higher ranks.

    def receive_doorbells(self) -> None:
        for pair in self.higher:
            if pair.shared:
                _, fds = self._receive(pair, 1)
                if len(fds) != 1:
                    self._fail({pair.rank: "it sent no doorbell"})
                pair.doorbell = fds[0]
            while not pair.shared and len(pair.data) < self.factory.config.tcp_streams:
                pair.data.append(self._accept(pair, Purpose.DATA, len(pair.data)))

    # Phase 5: if all pairs share memory, the lowest rank creates a shared segment, and
    # sends its memfd to all ranks.

    def share_segment(self) -> None:
        tile, ranks = self.factory.config.tile_bytes, len(self.ranks)
        if not (tile and self.pairs and all(p.local and p.shm for p in self.pairs)):
            return  # all ranks have the same settings, so all ranks return here
        tile = sizes.tile_bytes(tile, ranks, self.factory.segment_bytes)
        size = self.factory.segment_bytes(ranks, tile)
        self.tile = tile
        shared = all(pair.shared for pair in self.pairs)
        if not self.lower:
            votes = [self._receive(pair, 0)[0] for pair in self.higher]
            if shared and all(votes):
                self.segment = self._make_segment(size)
            for pair in self.higher:
                made = self.segment >= 0
                self._send(pair, size if made else 0, [self.segment] if made else [])
        else:
            self._send(self.lower[0], int(shared), [])
            offered, fds = self._receive(self.lower[0], 1)
            self.segment = fds[0] if fds else -1
            if offered and not shared_memory.is_valid(self.segment, size):
                text = "its shared segment has another size, or is unsealed"
                self._fail({self.lower[0].rank: text})

    def _make_segment(self, size: int) -> int:
        try:
            return shared_memory.create(size)
        except OSError as error:
            self.factory.log(
                "warning",
                f"{self.what}: {size} bytes of shared memory for all ranks cannot be "
                f"had ({error.strerror}): allreduce takes the rings, which is slower",
            )
            return -1

    # --- helpers of the phases ---

    def _accept(self, pair: PairSetup, purpose: Purpose, stream: int) -> socket.socket:
        key = ConnectionKey(self.factory.epoch, self.comm, purpose, stream, pair.rank)
        listener = self.factory.listener
        while (accepted := listener.accept(key, 0.1)) is None:
            self._check(
                lambda: {
                    other.rank: "it did not call"
                    for other in self.higher
                    if other is pair or not self._has_called(other)
                }
            )
        sock = accepted.sock
        pair.keys[sock] = accepted.key
        try:
            self._set_options(sock, purpose)
        except OSError as error:
            sock.close()
            raise self._peer_lost(pair, error) from error
        return sock

    def _has_called(self, pair: PairSetup) -> bool:
        """Returns whether a higher rank has opened any connection of this mesh."""
        purpose = Purpose.CONTROL if pair.needs_control else Purpose.DATA
        key = ConnectionKey(self.factory.epoch, self.comm, purpose, 0, pair.rank)
        connected = pair.control is not None or bool(pair.data)
        return connected or self.factory.listener.has(key)

    def _set_options(self, sock: socket.socket, purpose: Purpose) -> None:
        # The heartbeats on the control connection find a silent peer. Probes on the
        # data connections only keep them in the tables of firewalls.
        interval = 1 if purpose is Purpose.CONTROL else _KEEPALIVE
        address.set_link_options(sock, self.factory.config.failure_timeout, interval)

    def _send(self, pair: PairSetup, size: int, fds: list[int]) -> None:
        assert pair.control is not None
        while True:
            try:
                return shared_memory.send_descriptors(pair.control, size, fds)
            except OSError as error:
                if not is_shortage(error):
                    raise self._peer_lost(pair, error) from error
                if time.monotonic() > self.deadline:
                    raise
            # While this rank cannot send, receive descriptors, so that others can send.
            receive_early(self.pairs)

    def _receive(self, pair: PairSetup, most: int) -> tuple[int, list[int]]:
        assert pair.control is not None
        while True:
            try:
                received = pair.receive(most, 0.1)
            except OSError as error:
                if is_shortage(error):
                    raise
                raise self._peer_lost(pair, error) from error
            if received is not None:
                return received
            receive_early(self.pairs)  # otherwise the peer may be unable to send
            self._check(lambda: {pair.rank: "it does not answer"})

    def _peer_lost(self, pair: PairSetup, why: object) -> PeerLost:
        return PeerLost(f"{self.what}: rank {pair.rank} is gone: {why}", pair.rank)

    def _check(self, missing: Callable[[], dict[int, str]]) -> None:
        """Raises an error if a rank of the mesh is lost or the start timeout is over.

        `missing` returns the peers for which this rank waits, with the reasons.
        """
        for rank, why in self.factory.loss_monitor.departed_ranks().items():
            if rank in self.ranks:
                raise PeerLost(f"{self.what}: rank {rank} {why}", rank)
        if time.monotonic() >= self.deadline:
            limit = self.factory.config.start_timeout
            self._fail(missing(), f" within {limit:g} s")

    def _fail(self, missing: dict[int, str], when: str = "") -> NoReturn:
        hello = {r: self.factory.members[r].hello for r in missing}
        reasons = "; ".join(
            f"rank {r} on {hello[r].get('hostname')}: {why}; its addresses are "
            f"{hello[r].get('addresses')}"
            for r, why in missing.items()
        )
        raise Unreachable(
            f"{self.what}: rank {self.factory.rank} could not be connected with "
            f"{ranks_text(list(missing))}{when} ({reasons})",
            list(missing),
        )

    def take_descriptors(self) -> LinkDescriptors:
        """Returns all descriptors. From then on, the caller must close them."""
        mesh, index = self.mesh, {rank: i for i, rank in enumerate(self.ranks)}
        for pair in self.pairs:
            peer = index[pair.rank]
            if pair.shared:
                side = int(index[self.factory.rank] > peer)
                # Get the peer's pid from the kernel, because a peer could send the pid
                # of a process whose memory the peer itself must not read.
                process = peer_pid(pair.control) if pair.control else 0
                rings = (pair.memory, side, self.ring, pair.doorbell)
                mesh.links.append(("shm", peer, *rings, process))
                pair.memory = pair.doorbell = -1
            else:
                keys = [pair.keys[sock] for sock in pair.data]
                sockets = [sock.detach() for sock in pair.data]
                mesh.links.append(
                    ("tcp", peer, sockets, *([keys] if any(keys) else []))
                )
            if pair.watched and pair.control is not None:
                mesh.control_keys.append(pair.keys[pair.control])
                mesh.control.append((pair.rank, pair.control.detach()))
        if self.segment >= 0:
            doorbells = [-1] * len(self.ranks)
            mesh.segment = (self.segment, self.tile, doorbells)
            self.segment = -1
            for link in mesh.links:
                doorbells[link[1]] = os.dup(link[5])
        self.mesh = LinkDescriptors()  # `close` must not close the caller's descriptors
        return mesh

    def close(self) -> None:
        """Closes the descriptors that `take_descriptors` has not returned."""
        for pair in self.pairs:
            pair.close()
        if self.segment >= 0:
            os.close(self.segment)
        self.mesh.close()
