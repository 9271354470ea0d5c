"""One generation of membership on this rank: links, heartbeat and communicators.

Made from a fabric, which knows the members; ended as a whole. Who the members are, and
what follows an epoch, is in epoch_sequence.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from ringjax import _native
from ringjax.config import Config
from ringjax.control.member import Member
from ringjax.links.descriptors import LinkDescriptors
from ringjax.links.mesh import MeshFactory
from ringjax.world.controls import place_of, set_of
from ringjax.world.coordinates import Standing
from ringjax.world.lanes import LANE
from ringjax.world.whereabouts import Whereabouts

SMALL_RING = 1 << 14  # of a control communicator; the least that RING_BYTES may be


class Epoch:
    """What this rank holds of one membership.

    Args:
        config: the settings.
        standing: this rank's coordinates in it.
        fabric: connects the ranks; None: this rank is alone.
        notify: an eventfd to ring when a peer is lost; -1: the job is not elastic.
        whereabouts: tells peers that wait where this rank's program is.

    Attributes:
        number: the epoch's; the first is 0.
        communicators: by number.
        served: those of them that calls of the program get -> the resilient
            communicator that outlives the epoch, None in a job that is not elastic.
        cost: the constants of the links; of the communicators that come.
        recorder: hears of the calls of the communicators that come.
    """

    def __init__(
        self,
        config: Config,
        standing: Standing,
        fabric: MeshFactory | None = None,
        notify: int = -1,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self.config, self.standing, self.fabric = config, standing, fabric
        self.number = fabric.epoch if fabric is not None else 0
        self.communicators: dict[int, _native.Communicator] = {}
        self.served: dict[int, _native.ResilientComm | None] = {}
        self.cost: dict[str, float] = {}
        self.recorder: _native.Recorder | None = None
        self._notify, self._whereabouts = notify, whereabouts
        # What the core holds, by communicator: numbers and inodes of the sockets.
        self._sockets: dict[int, list[tuple[int, int]]] = {}
        self._heartbeat: _native.Heartbeat | None = None
        self._meshes: dict[int, LinkDescriptors] = {}  # without communicator yet

    def link(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        fabric: MeshFactory | None = None,
    ) -> None:
        """Connects this rank with the others of `ranks`, who all do it.

        Raises:
            StartupError, PeerLost: some could not be reached.
        """
        fabric = fabric or self.fabric
        if fabric is None:
            mesh = LinkDescriptors(
                doorbell=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            )
        else:
            mesh = fabric.build(number, ranks, name, control=number == 0)
        self._meshes[number] = mesh
        self._sockets[number] = mesh.sockets()
        if mesh.control:
            # Before all communicators exist: silence would look like a death.
            control, mesh.control = mesh.control, []
            self._heartbeat = self._make_heartbeat(control, mesh.control_keys)

    def _make_heartbeat(
        self, control: Sequence[tuple[int, int]], keys: list[bytes]
    ) -> _native.Heartbeat:
        assert self.fabric is not None
        names = (member.hello.get("hostname") for member in self.fabric.members)
        asks = self._whereabouts
        heartbeat = _native.Heartbeat(
            self.standing.rank,
            control,
            interval=self.config.heartbeat,
            timeout=self.config.failure_timeout,
            notify=self._notify,
            inquire=-1 if asks is None else asks.bell,
            hosts=[str(name or "") for name in names],
            **({"keys": keys} if any(keys) else {}),
        )
        if asks is not None:
            asks.serve(heartbeat)
        return heartbeat

    def open(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        resilient: _native.ResilientComm | None = None,
        *,
        config: Config | None = None,
        watched: bool = True,
        ending: _native.Communicator | None = None,
        served: bool = False,
    ) -> _native.Communicator:
        """Makes the communicator of what was linked.

        Args:
            resilient: the resilient communicator that it belongs to, in an elastic job.
            ending: where its calls end together with those of others.
            config: other settings than the epoch's.
            watched: the heartbeat ends it, and hears of its failures.
            served: calls of the program get it.
        """
        config, mesh = config or self.config, self._meshes.pop(number)
        job = int(self.fabric.job, 16) if self.fabric is not None else 0
        communicator = _native.Communicator(
            id=number,
            name=name,
            job=job,
            epoch=self.number,
            rank=list(ranks).index(self.standing.rank),
            hosts=[self.standing.hosts[rank] for rank in ranks],
            members=list(ranks),
            links=mesh.links,
            doorbell=mesh.doorbell,
            segment=mesh.segment,
            options={
                "ring_bytes": config.ring_bytes,
                "spin_us": config.spin_us,
                "stall_warning": config.stall_warning,
                "collective_timeout": config.collective_timeout,
                "algorithm": config.algorithm,
                "cost": self.cost,
                "process_set": set_of(number),
                "device_index": place_of(number),
                "eager": number & LANE,
                **({} if self.recorder is None else {"recorder": self.recorder}),
            },
            resilient=resilient,
            ending=ending,
        )
        self.communicators[number] = communicator
        if served:
            self.served[number] = resilient
        if watched and self._heartbeat is not None:
            self._heartbeat.watch(communicator)
        return communicator

    def connect(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Builds a communicator; all of `ranks` do it, and this is one of them."""
        self.link(number, ranks, name)
        return self.open(number, ranks, name)

    def link_small(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        fabric: MeshFactory | None = None,
    ) -> Config:
        """As `link`, for messages of a few bytes.

        Returns:
            The settings to open it with.
        """
        fabric = fabric or self.fabric
        if fabric is None:
            self.link(number, ranks, name)
            return self.config
        small = dataclasses.replace(
            fabric.config,
            ring_bytes=SMALL_RING,
            tile_bytes=0,
            tcp_streams=1,
            algorithm="",
        )
        self.link(number, ranks, name, dataclasses.replace(fabric, config=small))
        return small

    def connect_small(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """As `connect`, for messages of a few bytes."""
        small = self.link_small(number, ranks, name)
        return self.open(number, ranks, name, config=small)

    def disconnect(self, number: int) -> None:
        """Ends a communicator, if there is one."""
        if (mesh := self._meshes.pop(number, None)) is not None:
            mesh.close()
        communicator = self.communicators.pop(number, None)
        if communicator is not None:
            if self._heartbeat is not None:
                self._heartbeat.forget(communicator)
            communicator.close()
        self.served.pop(number, None)
        self._sockets.pop(number, None)

    def calls(self, number: int) -> int:
        """How many calls a communicator has completed."""
        communicator = self.communicators.get(number)
        every = communicator.stats().values() if communicator is not None else ()
        return sum(int(stats.get("calls", 0)) for stats in every)

    @property
    def heartbeat(self) -> _native.Heartbeat | None:
        """What watches the other ranks; None if this one is alone, and at the end."""
        return self._heartbeat

    @property
    def members(self) -> Sequence[Member]:
        """All ranks of it, as they know each other; none if this one is alone."""
        return [] if self.fabric is None else self.fabric.members

    def lost(self) -> list[tuple[int, str]]:
        """The ranks that the heartbeat has lost, and why, the first one first."""
        return [] if self._heartbeat is None else self._heartbeat.lost()

    def fail(self, text: str) -> None:
        """Tells the peers that this rank goes down, and why."""
        if self._heartbeat is not None:
            self._heartbeat.fail(text)

    def leave(self) -> None:
        """Tells the peers that this rank leaves in good order."""
        if self._heartbeat is not None:
            self._heartbeat.leave()

    def abort(self, text: str, rank: int) -> None:
        """Fails what is pending, so that nothing waits for it."""
        for communicator in list(self.communicators.values()):
            communicator.abort(text, rank)

    def close(self) -> None:
        """Ends everything. May be called on half of an epoch, and twice."""
        heartbeat, self._heartbeat = self._heartbeat, None
        # Copies: the program's thread may be making links here that come to nothing.
        for communicator in list(self.communicators.values()):
            if heartbeat is not None:
                heartbeat.forget(communicator)
            communicator.close()
        if heartbeat is not None:
            heartbeat.close()
            if self._whereabouts is not None:
                self._whereabouts.forget(heartbeat)
        for mesh in list(self._meshes.values()):
            mesh.close()
        # The core closes its descriptors when nobody refers to its objects any more.
        self.communicators.clear()
        self.served.clear()
        self._meshes.clear()
        self._sockets.clear()

    def abandon(self) -> None:
        """In a forked child: closes the copies of the sockets and nothing else."""
        for sockets in self._sockets.values():
            for fd, inode in sockets:
                with contextlib.suppress(OSError):
                    # The core may have closed it, and the number be somebody else's.
                    if os.fstat(fd).st_ino == inode:
                        os.close(fd)
