"""The links of a communicator: every pair of its ranks connected in the best way.

Ranks of one host share memory: a sealed memfd and both doorbells (eventfds) travel over
a unix socket whose user is checked. Other pairs, and all that have to do without shared
memory, get several TCP sockets. Every connection is authenticated
(control/handshake.py). The result is descriptors for the native core; nothing here
moves tensors. The higher rank of a pair calls, the lower one receives the call in
`LinkListener` and makes the memory.
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
from ringjax.links import shared_memory, sizes
from ringjax.links.descriptors import LinkDescriptors as LinkDescriptors
from ringjax.links.pair import PairSetup, take_early

_ATTEMPT = 2.0  # seconds for one attempt to connect
_GIVE_UP = 3.0  # seconds after which a rank that refuses all the time counts as gone


class LossMonitor(Protocol):
    """Who knows whether it is worth while to go on; asked again and again."""

    def departed_ranks(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why. May raise, too."""


@dataclass(frozen=True)
class MeshFactory:
    """What all communicators of an epoch are built from.

    Attributes:
        rank: this rank in the world.
        hosts: for each world rank the number of its host.
        shm_bytes: how large the memory of a pair is, from the bytes of one ring.
        segment_bytes: the bytes of a shared segment, from the ranks and a tile's bytes.
        log: takes a level and a sentence.
    """

    rank: int
    members: Sequence[Member]
    hosts: Sequence[int]
    epoch: int
    job: str
    secret: bytes = field(repr=False)
    config: Config
    listener: LinkListener
    session: LossMonitor
    shm_bytes: Callable[[int], int]
    segment_bytes: Callable[[int, int], int]
    log: Callable[[str, str], None]

    def build(
        self, comm: int, ranks: Sequence[int], what: str, *, control: bool = False
    ) -> LinkDescriptors:
        """Connects this rank with all others of `ranks`; all of them must do it.

        Args:
            comm: the communicator's number, the same on all ranks.
            ranks: world ranks in the communicator's order; this one is among them.
            what: names the communicator in errors.
            control: also keep a control connection to each of them.

        Raises:
            Unreachable: some could not be reached within the start timeout.
            PeerLost: a rank is known to be gone.
            OutOfDescriptors: this rank may not have so many.
        """
        try:
            work = _MeshBuilder(self, comm, ranks, what)
            try:
                work.call_lower()
                failpoints.passing("mesh.called")
                work.offer_to_higher()
                work.take_from_lower()
                work.hear_from_higher()
                work.share_segment()
                failpoints.passing("mesh.shared")
                return work.result(control)
            finally:
                work.close()
        except OSError as error:
            if not is_shortage(error):
                raise
            raise OutOfDescriptors(
                f"{what}: rank {self.rank} could not be connected with the others: "
                f"{error}: {open_files.limit_text()}"
            ) from error


class _MeshBuilder:
    """One building of one communicator, in phases that wait for no chain of ranks."""

    def __init__(
        self, fabric: MeshFactory, comm: int, ranks: Sequence[int], what: str
    ) -> None:
        self.fabric, self.comm, self.ranks, self.what = fabric, comm, ranks, what
        self.deadline = time.monotonic() + fabric.config.start_timeout
        self.pairs = [self._pair(r) for r in sorted(ranks) if r != fabric.rank]
        open_files.require(self._descriptors(), f"{what}: rank {fabric.rank}")
        # What all processes of a user have sent and not received counts for each.
        open_files.raise_limit(2 * sum(pair.shared for pair in self.pairs) ** 2)
        self.mesh = LinkDescriptors(
            doorbell=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        )
        near = 1 + sum(pair.local for pair in self.pairs)
        self.ring = sizes.ring(fabric.config.ring_bytes, near, fabric.shm_bytes)
        self.size = fabric.shm_bytes(self.ring)
        self.lower = [p for p in self.pairs if p.rank < fabric.rank]
        self.higher = [p for p in self.pairs if p.rank > fabric.rank]
        self.segment = -1
        self.tile = 0

    def _descriptors(self) -> int:
        """How many there are when most are open."""
        # With memory: the connection, the memory, the doorbell twice (once for the
        # shared segment).
        tcp = 1 + self.fabric.config.tcp_streams
        return 2 + sum(4 if pair.shared else tcp for pair in self.pairs)

    def _pair(self, rank: int) -> PairSetup:
        hosts, members, me = self.fabric.hosts, self.fabric.members, self.fabric.rank
        local = hosts[rank] == hosts[me]
        both = all(members[r].hello.get("shm") for r in (rank, me))
        return PairSetup(rank, local=local, shm=both)

    # Phase 1: call every lower rank; those that do not answer are called again.

    def call_lower(self) -> None:
        # From the nearest one down: not all ranks are to call rank 0 at the same time.
        self._reach(self.lower[::-1])

    def _reach(self, pairs: Sequence[PairSetup]) -> None:
        waiting = {pair.rank: pair for pair in pairs}
        refused_since: dict[int, float] = {}
        why: dict[int, str] = {}
        while waiting:
            for rank, pair in list(waiting.items()):
                try:
                    self._call(pair)
                except (OSError, AuthenticationError) as error:
                    if is_shortage(error):
                        raise
                    why[rank] = str(error)
                    if not _is_refusal(error):
                        refused_since.pop(rank, None)
                    since = refused_since.setdefault(rank, time.monotonic())
                    if _is_refusal(error) and time.monotonic() - since > _GIVE_UP:
                        self._fail({rank: f"{why[rank]}, the process is gone"})
                else:
                    del waiting[rank]
            if waiting:
                self._check(lambda: {r: why[r] for r in waiting})
                time.sleep(0.02)

    def _call(self, pair: PairSetup) -> None:
        if pair.control is None:
            pair.control = self._connect(pair, Purpose.CONTROL, 0)
        while not pair.shared and len(pair.data) < self.fabric.config.tcp_streams:
            sock = self._connect(pair, Purpose.DATA, len(pair.data))
            pair.data.append(sock)

    def _connect(self, pair: PairSetup, purpose: Purpose, stream: int) -> socket.socket:
        fabric = self.fabric
        offered = offer_for(fabric.config.tls)
        introduction = HandshakeRequest(
            fabric.job,
            purpose,
            fabric.rank,
            pair.rank,
            fabric.epoch,
            self.comm,
            stream,
        )
        errors: list[Exception] = []
        for where in self._candidates(pair, purpose):
            sock = None
            try:
                left = max(0.05, self.deadline - time.monotonic())
                sock = address.connect(where, min(_ATTEMPT, left))
                if sock.family == socket.AF_UNIX and peer_uid(sock) != os.geteuid():
                    raise AuthenticationError("it belongs to another user")
                limit = min(HANDSHAKE_TIMEOUT, left)
                inside = sock.family == socket.AF_UNIX
                said = replace(introduction, tls=TlsOffer.NONE if inside else offered)
                pair.keys[sock] = authenticate(sock, fabric.secret, said, limit).link
                address.set_link_options(sock, fabric.config.failure_timeout)
            except (OSError, AuthenticationError) as error:
                if sock is not None:
                    sock.close()
                errors.append(error)
            else:
                return sock
        # A refusal says least: something else is the better explanation.
        errors.sort(key=_is_refusal)
        raise errors[0] if errors else OSError("it gave no address")

    def _candidates(
        self, pair: PairSetup, purpose: Purpose
    ) -> list[str | tuple[str, int]]:
        """Where to call a rank, best first."""
        member = self.fabric.members[pair.rank]
        if pair.local and purpose == Purpose.CONTROL:
            return ["\0" + str(member.hello["door"])]
        found = address.parse(str(member.hello["addresses"]))
        mine = self.fabric.members[self.fabric.rank].hello
        near = mine.get("machine") == member.hello.get("machine")
        if not near:
            found = [a for a in found if not address.is_loopback(a[0])] or found
        found.sort(
            key=lambda a: (near != address.is_loopback(a[0]), a[0] != member.seen)
        )
        return list(found)

    # Phase 2: the lower rank of a pair on one host makes the memory and offers it.

    def offer_to_higher(self) -> None:
        for pair in self.higher:
            pair.control = self._accept(pair, Purpose.CONTROL, 0)
        shared = [pair for pair in self.higher if pair.shared]
        try:
            left = shared_memory.available()
            for pair in shared:
                pair.memory = shared_memory.make(self.size, left)
                left -= self.size
        except OSError as error:
            if is_shortage(error):
                raise
            self.fabric.log(
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
        # Who has no higher rank takes what comes at once, so that it does not pile up.
        for pair in reversed(shared):
            offer = [pair.memory, self.mesh.doorbell] if pair.shared else []
            self._send(pair, self.size if pair.shared else 0, offer)

    # Phase 3: the higher rank takes it and answers with its own doorbell.

    def take_from_lower(self) -> None:
        for pair in self.lower:
            if not pair.shared:
                continue
            size, fds = self._receive(pair, 2)
            if size == 0 and not fds:
                pair.shared = False
                self._reach([pair])  # now for the data sockets
                continue
            if len(fds) == 2:
                pair.memory, pair.doorbell = fds
            else:
                for fd in fds:
                    os.close(fd)
            if pair.memory < 0 or not shared_memory.is_sound(pair.memory, self.size):
                self._fail(
                    {pair.rank: "it offered memory of another size, or unsealed"}
                )
            self._send(pair, self.size, [self.mesh.doorbell])

    # Phase 4: the lower rank learns the doorbells of the higher ones.

    def hear_from_higher(self) -> None:
        for pair in self.higher:
            if pair.shared:
                _, fds = self._receive(pair, 1)
                if len(fds) != 1:
                    self._fail({pair.rank: "it sent no doorbell"})
                pair.doorbell = fds[0]
            while not pair.shared and len(pair.data) < self.fabric.config.tcp_streams:
                pair.data.append(self._accept(pair, Purpose.DATA, len(pair.data)))

    # Phase 5: if every rank shares memory with every other, all map one shared segment,
    # which the lowest rank makes.

    def share_segment(self) -> None:
        tile, ranks = self.fabric.config.tile_bytes, len(self.ranks)
        if not (tile and self.pairs and all(p.local and p.shm for p in self.pairs)):
            return  # alike on all ranks
        tile = sizes.tile(tile, ranks, self.fabric.segment_bytes)
        size = self.fabric.segment_bytes(ranks, tile)
        self.tile = tile
        shared = all(pair.shared for pair in self.pairs)
        if not self.lower:
            votes = [self._receive(pair, 0)[0] for pair in self.higher]
            if shared and all(votes):
                self.segment = self._make_segment(size)
            for pair in self.higher:
                some = self.segment >= 0
                self._send(pair, size if some else 0, [self.segment] if some else [])
        else:
            self._send(self.lower[0], int(shared), [])
            offered, fds = self._receive(self.lower[0], 1)
            self.segment = fds[0] if fds else -1
            if offered and not shared_memory.is_sound(self.segment, size):
                text = "its shared segment has another size, or is unsealed"
                self._fail({self.lower[0].rank: text})

    def _make_segment(self, size: int) -> int:
        try:
            return shared_memory.make(size)
        except OSError as error:
            self.fabric.log(
                "warning",
                f"{self.what}: {size} bytes of shared memory for all ranks cannot be "
                f"had ({error.strerror}): allreduce takes the rings, which is slower",
            )
            return -1

    # What the phases need.

    def _accept(self, pair: PairSetup, purpose: Purpose, stream: int) -> socket.socket:
        key = ConnectionKey(self.fabric.epoch, self.comm, purpose, stream, pair.rank)
        listener = self.fabric.listener
        while (accepted := listener.accept(key, 0.1)) is None:
            self._check(
                lambda: {
                    other.rank: "it did not call"
                    for other in self.higher
                    if other is pair
                    or not (
                        other.control or listener.has(key._replace(caller=other.rank))
                    )
                }
            )
        sock = accepted.sock
        pair.keys[sock] = accepted.key
        try:
            address.set_link_options(sock, self.fabric.config.failure_timeout)
        except OSError as error:
            sock.close()
            raise self._lost(pair, error) from error
        return sock

    def _send(self, pair: PairSetup, size: int, fds: list[int]) -> None:
        assert pair.control is not None
        while True:
            try:
                return shared_memory.send(pair.control, size, fds)
            except OSError as error:
                if not is_shortage(error):
                    raise self._lost(pair, error) from error
                if time.monotonic() > self.deadline:
                    raise
            take_early(self.pairs)  # as all do who cannot send

    def _receive(self, pair: PairSetup, most: int) -> tuple[int, list[int]]:
        assert pair.control is not None
        while True:
            try:
                received = pair.receive(most, 0.1)
            except OSError as error:
                if is_shortage(error):
                    raise
                raise self._lost(pair, error) from error
            if received is not None:
                return received
            take_early(self.pairs)  # perhaps that is what it cannot send for
            self._check(lambda: {pair.rank: "it does not answer"})

    def _lost(self, pair: PairSetup, why: object) -> PeerLost:
        return PeerLost(f"{self.what}: rank {pair.rank} is gone: {why}", pair.rank)

    def _check(self, missing: Callable[[], dict[int, str]]) -> None:
        """Raises if a rank that is needed has gone, or the time is up."""
        for rank, why in self.fabric.session.departed_ranks().items():
            if rank in self.ranks:
                raise PeerLost(f"{self.what}: rank {rank} {why}", rank)
        if time.monotonic() >= self.deadline:
            limit = self.fabric.config.start_timeout
            self._fail(missing(), f" within {limit:g} s")

    def _fail(self, missing: dict[int, str], when: str = "") -> NoReturn:
        hello = {r: self.fabric.members[r].hello for r in missing}
        reasons = "; ".join(
            f"rank {r} on {hello[r].get('hostname')}: {why}; its addresses are "
            f"{hello[r].get('addresses')}"
            for r, why in missing.items()
        )
        raise Unreachable(
            f"{self.what}: rank {self.fabric.rank} could not be connected with "
            f"{ranks_text(list(missing))}{when} ({reasons})",
            list(missing),
        )

    def result(self, control: bool) -> LinkDescriptors:
        mesh, place = self.mesh, {rank: i for i, rank in enumerate(self.ranks)}
        for pair in self.pairs:
            peer = place[pair.rank]
            if pair.shared:
                side = int(place[self.fabric.rank] > peer)
                # The kernel's word: a peer could name a process that it may not read.
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
            if control and pair.control is not None:
                mesh.control_keys.append(pair.keys[pair.control])
                mesh.control.append((pair.rank, pair.control.detach()))
        if self.segment >= 0:
            bells = [-1] * len(self.ranks)
            mesh.segment = (self.segment, self.tile, bells)
            self.segment = -1
            for link in mesh.links:
                bells[link[1]] = os.dup(link[5])
        self.mesh = LinkDescriptors()  # now the caller's
        return mesh

    def close(self) -> None:
        """Closes whatever `result` has not handed out."""
        for pair in self.pairs:
            pair.close()
        if self.segment >= 0:
            os.close(self.segment)
        self.mesh.close()


def _is_refusal(error: Exception) -> bool:
    """Whether nobody listens there: a rank opens its doors before it joins."""
    return isinstance(error, ConnectionRefusedError)
