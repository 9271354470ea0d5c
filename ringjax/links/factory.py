"""Connects the ranks of a communicator: each pair that needs it, in the fastest way.

The ranks of a host share one memory. The lowest of them creates a memfd, and each rank
passes it on over a unix socket, along a tree. Other pairs, and ranks without shared
memory, use several TCP sockets. With RINGJAX_FABRIC, pairs between hosts use one: the
native core swaps libfabric's addresses over it, and later only learns from its end that
the peer is lost. Only neighbours in the standing graph (standing.py) are connected at
the start. All other pairs are connected when a call first needs them (`connect`). Every
connection is authenticated (control/handshake.py). Control connections of an earlier
epoch are used again (kept_connections.py). The result is a set of descriptors for the
native core; this module moves no tensors.

The higher rank of a pair connects to the `LinkListener` of the lower rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ringjax.control.unix_peer import peer_uid
from ringjax.control.worker_address import WorkerAddress
from ringjax.errors import (
    AuthenticationError,
    OutOfDescriptors,
    PeerLost,
    Stalled,
    Unreachable,
)
from ringjax.links import shared_memory, sizes, standing
from ringjax.links.control_connection import ControlConnection
from ringjax.links.descriptors import LinkDescriptors as LinkDescriptors
from ringjax.links.kept_connections import KeptConnections
from ringjax.links.pair import PairSetup

_CONNECT_TIMEOUT = 2.0  # seconds for one attempt to connect to an address
_KEEPALIVE = 60  # seconds between two probes on an idle data connection
# Seconds after which a rank that refuses every connection counts as dead. Each rank
# listens before it joins, so a refusal means that its process has probably ended.
_REFUSED_TIMEOUT = 3.0


class LossMonitor(Protocol):
    """Reports lost ranks. `LinkFactory` queries it repeatedly while it connects."""

    def departed_ranks(self) -> dict[int, str]:
        """Returns the lost ranks and the reasons. An exception makes `build` fail."""


@dataclass(frozen=True)
class LinkFactory:
    """Connects the ranks of an epoch, for one communicator after another.

    Attributes:
        rank: this rank in the world.
        members: the members of the epoch, by rank.
        hosts: the index of the host of each world rank.
        locate: returns the addresses of ranks, as `CoordinatorClient.locate` does.
        host_bytes: `_native.host_bytes`, which computes the bytes of a host's memory.
        log: called with a level, such as "warning", and a sentence.
        kept: the control connections of earlier epochs. The first successful `build`
            with `control` closes those that it does not use.
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
    locate: Callable[[Sequence[int], float, str, int], Mapping[int, WorkerAddress]]
    host_bytes: sizes.HostBytes
    log: Callable[[str, str], None]
    kept: KeptConnections = field(default_factory=KeptConnections)

    def build(
        self, comm: int, ranks: Sequence[int], what: str, *, control: bool = False
    ) -> LinkDescriptors:
        """Connects this rank to its neighbours. All other `ranks` must call it, too.

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
        with self._run(comm, ranks, what) as run:
            run.build(control)
            links = run.take_descriptors()
        if control:
            self.kept.close()
        return links

    def connect(
        self, comm: int, ranks: Sequence[int], what: str, peers: Sequence[int]
    ) -> LinkDescriptors:
        """Connects this rank to further `peers` of a communicator, by sockets.

        Each peer must connect itself to this rank at the same time. Raises as `build`
        does.
        """
        with self._run(comm, ranks, what) as run:
            run.connect_data(peers)
            return run.take_descriptors()

    def control_connection(
        self, rank: int, sock: socket.socket, received: bytes = b"", unsent: bytes = b""
    ) -> ControlConnection:
        """Returns an object for the control connection to a rank, see its class."""
        own, peer = self.members[self.rank].worker, self.members[rank].worker
        return ControlConnection(
            sock, self.secret, self.job, own, peer, received, unsent
        )

    @contextlib.contextmanager
    def _run(self, comm: int, ranks: Sequence[int], what: str) -> Iterator[_FactoryRun]:
        """Yields a run, and closes what the run has not returned."""
        try:
            with contextlib.closing(_FactoryRun(self, comm, ranks, what)) as run:
                yield run
        except OSError as error:
            if not is_shortage(error):
                raise
            raise OutOfDescriptors(
                f"{what}: rank {self.rank} could not be connected with the others: "
                f"{error}: {open_files.limit_text()}"
            ) from error


class _FactoryRun:
    """Connects one communicator.

    No step can deadlock: a rank waits only for ranks that announce the epoch, which
    they have done before they build anything, for higher ranks to connect, which wait
    only for these announcements, and for the memory from a lower rank of its host.
    """

    def __init__(
        self, factory: LinkFactory, comm: int, ranks: Sequence[int], what: str
    ) -> None:
        self.factory, self.comm, self.ranks, self.what = factory, comm, ranks, what
        self.deadline = time.monotonic() + factory.config.start_timeout
        self.pairs: dict[int, PairSetup] = {}
        # The addresses of the ranks to which this rank connects itself.
        self.addresses: dict[int, WorkerAddress] = {}
        # The ranks that share memory, in the order of their indices; this rank alone if
        # it shares none.
        self.sharing = self._sharing()
        self.memory = -1
        self.ring = self.tile = 0
        self.result = LinkDescriptors(name=self._name())

    def _sharing(self) -> list[int]:
        hosts, members = self.factory.hosts, self.factory.members
        own = self.factory.rank
        if not members[own].shm:
            return [own]
        near = [rank for rank in self.ranks if hosts[rank] == hosts[own]]
        return [rank for rank in near if members[rank].shm]

    def _name(self) -> str:
        """Returns the name of the doorbells, which only members of the job can compute.

        No two communicators of a host have the same name. Those with one id have
        different first ranks.
        """
        host = self.factory.hosts[self.factory.rank]
        words = self.factory.job, self.factory.epoch, self.comm, self.ranks[0], host
        text = " ".join(map(str, words))
        return hmac.new(self.factory.secret, text.encode(), hashlib.sha256).hexdigest()

    # -- the steps ---------------------------------------------------------------------

    def build(self, control: bool) -> None:
        """Connects the control connections, the memory of the host, and the data."""
        factory = self.factory
        hosts = [factory.hosts[rank] for rank in self.ranks]
        near = standing.neighbours(self.ranks.index(factory.rank), hosts)
        neighbours = [self.ranks[i] for i in near]
        # The tree by which the memfd is passed on: its edges are edges of the graph.
        index = self.sharing.index(factory.rank)
        parent, children = standing.tree(index, len(self.sharing))
        tree = [self.sharing[i] for i in (*children, *parent)]
        for rank in {*tree, *(neighbours if control else ())}:
            self._pair(rank).wants_control = True
            if control:
                kept = factory.kept.take(factory.members[rank].worker)
                self._pair(rank).kept = kept
        self._require_descriptors(neighbours)
        for rank in neighbours if control else ():
            self._pair(rank).watched = True
        far = [rank for rank in neighbours if rank not in self.sharing]
        for rank in far:
            self._pair(rank).wants_data = True
        self._connect_pairs()
        failpoints.passing("links.called")
        if len(self.sharing) > 1:
            self._share_memory(
                [self.pairs[self.sharing[i]] for i in parent],
                [self.pairs[self.sharing[i]] for i in children],
            )
        if len(self.sharing) > 1 and self.memory < 0:
            self.connect_data([r for r in neighbours if r in self.sharing])
        failpoints.passing("links.shared")

    def connect_data(self, peers: Sequence[int]) -> None:
        """Connects the TCP sockets to `peers`."""
        for rank in peers:
            self._pair(rank).wants_data = True
        self._connect_pairs()

    def _require_descriptors(self, neighbours: Sequence[int]) -> None:
        """Checks that this process may open the descriptors of the communicator."""
        far = sum(rank not in self.sharing for rank in neighbours)
        count = 4 + len(self.pairs) + far * self.factory.config.tcp_streams
        open_files.require(count, f"{self.what}: rank {self.factory.rank}")

    def _pair(self, rank: int) -> PairSetup:
        if rank not in self.pairs:
            near = self.factory.hosts[rank] == self.factory.hosts[self.factory.rank]
            self.pairs[rank] = PairSetup(rank, local=near)
        return self.pairs[rank]

    # -- connections -------------------------------------------------------------------

    def _lacks_data(self, pair: PairSetup) -> bool:
        """Returns whether the pair has to make connections for data."""
        config = self.factory.config
        on_fabric = config.fabric != "off" and not pair.local
        return pair.lacks_data(1 if on_fabric else config.tcp_streams)

    def _connect_pairs(self) -> None:
        own = self.factory.rank
        self._connect_lower()
        self._await_announcements()
        self._connect_lower()  # instead of the kept connections that have ended
        for rank in sorted(r for r in self.pairs if r > own):
            self._accept_pair(self.pairs[rank])

    def _connect_lower(self) -> None:
        """Connects to all lower ranks whose connections are missing."""
        own = self.factory.rank
        # Begin with the nearest rank, so that not all ranks connect to rank 0 at the
        # same time.
        lower = [
            rank
            for rank, pair in sorted(self.pairs.items(), reverse=True)
            if rank < own and (pair.lacks_control or self._lacks_data(pair))
        ]
        if lower:
            self._locate(lower)
            self._connect_all([self.pairs[rank] for rank in lower])

    def _await_announcements(self) -> None:
        """Waits until the peer of each kept connection has announced this epoch."""
        waiting = {p.kept.sock.fileno(): p for p in self.pairs.values() if p.kept}
        ready, poll = list(waiting), select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            for fd in ready:
                pair = waiting[fd]
                self._read_announcement(pair)
                if pair.kept is None:
                    del waiting[fd]
                if pair.kept is None or pair.kept.peer_epoch > self.factory.epoch:
                    poll.unregister(fd)
            if waiting:
                self._check(
                    lambda: {p.rank: "it is in another epoch" for p in waiting.values()}
                )
                ready = [fd for fd, _ in poll.poll(100)]

    def _read_announcement(self, pair: PairSetup) -> None:
        """Puts a kept connection to use, or forgets it if it has ended."""
        assert pair.kept is not None
        try:
            epoch = pair.kept.read_epoch(self.factory.epoch)
        except (OSError, AuthenticationError) as error:
            if is_shortage(error):
                raise
            pair.kept.close()
            pair.kept = None
            self.factory.log("debug", f"connects to rank {pair.rank} anew: {error}")
        else:
            if epoch == self.factory.epoch:
                pair.control, pair.kept = pair.kept, None

    def _locate(self, ranks: Sequence[int]) -> None:
        """Asks the coordinator for the addresses of ranks."""
        factory = self.factory
        left = max(1.0, self.deadline - time.monotonic())
        try:
            found = factory.locate(ranks, left, self.what, factory.epoch)
        except Stalled as error:
            raise Unreachable(str(error)) from error
        self.addresses |= found
        missing = [rank for rank in ranks if rank not in found]
        if missing:
            self._check(dict)  # the reason may be known
            raise PeerLost(
                f"{self.what}: {ranks_text(missing)} left the job", missing[0]
            )

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
        if pair.lacks_control:
            sock = self._connect(pair, Purpose.CONTROL, 0)
            pair.control = self.factory.control_connection(pair.rank, sock)
        while self._lacks_data(pair):
            sock = self._connect(pair, Purpose.DATA, len(pair.data))
            pair.data.append(sock)

    def _accept_pair(self, pair: PairSetup) -> None:
        if pair.lacks_control:
            sock = self._accept(pair, Purpose.CONTROL, 0)
            pair.control = self.factory.control_connection(pair.rank, sock)
        while self._lacks_data(pair):
            pair.data.append(self._accept(pair, Purpose.DATA, len(pair.data)))

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
        peer = self.addresses[pair.rank]
        if pair.local and purpose == Purpose.CONTROL:
            return ["\0" + peer.door]
        found = address.parse(peer.addresses)
        if not peer.near:
            found = [a for a in found if not address.is_loopback(a[0])] or found
        found.sort(
            key=lambda a: (peer.near != address.is_loopback(a[0]), a[0] != peer.seen)
        )
        return list(found)

    # -- the memory of the host --------------------------------------------------------

    def _share_memory(
        self, parent: Sequence[PairSetup], children: Sequence[PairSetup]
    ) -> None:
        """Creates the memory, or receives it from the parent, and passes it on."""
        config, ranks = self.factory.config, len(self.sharing)
        host_bytes = self.factory.host_bytes
        self.ring = sizes.ring_bytes(config.ring_bytes, ranks, host_bytes)
        if config.tile_bytes and self._is_even(ranks):
            self.tile = sizes.tile_bytes(config.tile_bytes, ranks, host_bytes)
        fixed, size = host_bytes(ranks, self.ring, self.tile)
        if not parent:
            self.memory = self._create_memory(fixed, size)
        else:
            offered, self.memory = self._receive(parent[0])
            if offered and not shared_memory.is_valid(self.memory, size):
                self._fail(
                    {parent[0].rank: "it offered memory of another size, or unsealed"}
                )
        made = self.memory >= 0
        for child in children:
            self._send(child, size if made else 0, [self.memory] if made else [])

    def _is_even(self, ranks: int) -> bool:
        """Returns whether each host has `ranks` ranks, which all share its memory."""
        members = [self.factory.members[rank] for rank in self.ranks]
        hosts = Counter(self.factory.hosts[rank] for rank in self.ranks)
        return all(m.shm for m in members) and set(hosts.values()) == {ranks}

    def _create_memory(self, fixed: int, size: int) -> int:
        try:
            return shared_memory.create(size, fixed)
        except OSError as error:
            if is_shortage(error):
                raise
            self.factory.log(
                "warning",
                f"{self.what}: {fixed} bytes of shared memory cannot be had "
                f"({error.strerror}): using TCP on this host, which is slower",
            )
            return -1

    # -- helpers of the steps ----------------------------------------------------------

    def _accept(self, pair: PairSetup, purpose: Purpose, stream: int) -> socket.socket:
        key = ConnectionKey(self.factory.epoch, self.comm, purpose, stream, pair.rank)
        listener = self.factory.listener
        while (accepted := listener.accept(key, 0.1)) is None:
            self._check(
                lambda: {
                    other.rank: "it did not call"
                    for other in self.pairs.values()
                    if other is pair
                    or (other.rank > pair.rank and not self._has_called(other))
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
        """Returns whether a higher rank has opened any of its connections."""
        purpose = Purpose.CONTROL if pair.wants_control else Purpose.DATA
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
                return shared_memory.send_memory(pair.control, size, fds)
            except OSError as error:
                if not is_shortage(error):
                    raise self._peer_lost(pair, error) from error
                if time.monotonic() > self.deadline:
                    raise
            # The kernel limits the descriptors of a user that were sent and not yet
            # received, in all processes together, and no event reports that it lets
            # this rank send again.
            time.sleep(0.005)

    def _receive(self, pair: PairSetup) -> tuple[int, int]:
        assert pair.control is not None
        while True:
            if pair.control.peer_epoch > self.factory.epoch:
                # This epoch is over. The coordinator is about to tell this rank, whose
                # only thread for this is here: `_check` reads what has arrived.
                time.sleep(0.1)
                self._check(lambda: {pair.rank: "it is in another epoch"})
                continue
            try:
                received = shared_memory.receive_memory(pair.control, 0.1)
            except (OSError, AuthenticationError) as error:
                if is_shortage(error):
                    raise
                raise self._peer_lost(pair, error) from error
            if received is not None:
                return received
            self._check(lambda: {pair.rank: "it does not answer"})

    def _peer_lost(self, pair: PairSetup, why: object) -> PeerLost:
        # A peer whose own links fail closes them just before it tells the coordinator
        # why, and the reason names the rank that is lost. Poll, because a LossMonitor
        # has no event. An elastic job needs no reason, because it goes on.
        wait = 0.0 if self.factory.config.elastic else 0.2
        deadline = time.monotonic() + wait
        departed: dict[int, str] = {}
        while pair.rank not in departed and time.monotonic() < deadline:
            time.sleep(0.002)
            departed = self.factory.loss_monitor.departed_ranks()
        reason = f"; it {departed[pair.rank]}" if pair.rank in departed else ""
        host = self.factory.members[pair.rank].hostname
        text = f"rank {pair.rank} on {host} is gone: {why}{reason}"
        return PeerLost(f"{self.what}: {text}{self._where(pair.rank)}", pair.rank)

    def _where(self, rank: int) -> str:
        """Returns the addresses of a rank as the end of an error, "" if unknown."""
        known = self.addresses.get(rank)
        return "" if known is None else f"; its addresses are {known.addresses}"

    def _check(self, missing: Callable[[], dict[int, str]]) -> None:
        """Raises an error if a rank is lost, or if the start timeout is over.

        `missing` returns the peers for which this rank waits, with the reasons.
        """
        for rank, why in self.factory.loss_monitor.departed_ranks().items():
            if rank in self.ranks:
                raise PeerLost(f"{self.what}: rank {rank} {why}", rank)
        if time.monotonic() >= self.deadline:
            limit = self.factory.config.start_timeout
            self._fail(missing(), f" within {limit:g} s")

    def _fail(self, missing: dict[int, str], when: str = "") -> NoReturn:
        reasons = "; ".join(
            f"rank {rank} on {self.factory.members[rank].hostname}: {why}"
            + self._where(rank)
            for rank, why in missing.items()
        )
        raise Unreachable(
            f"{self.what}: rank {self.factory.rank} could not be connected with "
            f"{ranks_text(list(missing))}{when} ({reasons})",
            list(missing),
        )

    def take_descriptors(self) -> LinkDescriptors:
        """Returns all descriptors. From then on, the caller must close them."""
        found, index = self.result, {rank: i for i, rank in enumerate(self.ranks)}
        for pair in self.pairs.values():
            if pair.data:
                keys = [pair.keys[sock] for sock in pair.data]
                sockets = [sock.detach() for sock in pair.data]
                found.links.append(
                    (index[pair.rank], sockets, keys if any(keys) else [])
                )
                pair.data = []
            if pair.watched and pair.control is not None:
                found.control_keys.append(pair.keys.get(pair.control.sock, b""))
                found.control.append((pair.rank, pair.control.detach()))
        if self.memory >= 0:
            sharing = [index[rank] for rank in self.sharing]
            found.memory = (self.memory, self.ring, self.tile, sharing)
            self.memory = -1
        return found

    def close(self) -> None:
        """Closes the descriptors that `take_descriptors` has not returned.

        Gives the kept connections back instead, for the next attempt.
        """
        for pair in self.pairs.values():
            for connection in pair.release_kept():
                self.factory.kept.add(connection)
            pair.close()
        if self.memory >= 0:
            os.close(self.memory)
