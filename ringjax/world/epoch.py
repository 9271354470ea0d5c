"""Epoch: the links, the heartbeat and the communicators of one set of members.

An epoch is made from a `MeshFactory`, which connects its members, and ends as a whole.
epoch_sequence.py decides when an epoch begins and which epoch follows.
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
from ringjax.world.communicator_ids import EAGER_LANE, device_index_of, process_set_of
from ringjax.world.rank_info import RankInfo
from ringjax.world.stack_probe import StackProbe

_CONTROL_RING_BYTES = 1 << 14  # the minimum of RING_BYTES


class Epoch:
    """The native objects of one epoch.

    Args:
        mesh_factory: connects the members; None if this rank is the only one.
        notify: an eventfd that the heartbeat writes to when a peer is lost; -1 in a
            static job.
        stack_probe: replies to late-rank questions of peers.

    Attributes:
        number: the number of the epoch, from 0.
        communicators: by id.
        served: for each communicator that serves calls of the program, the resilient
            communicator to which it belongs; None in a static job.
        cost: constants of the cost model, for communicators that are opened later.
        recorder: records the calls of communicators that are opened later.
    """

    def __init__(
        self,
        config: Config,
        rank_info: RankInfo,
        mesh_factory: MeshFactory | None = None,
        notify: int = -1,
        stack_probe: StackProbe | None = None,
    ) -> None:
        self.config, self.rank_info, self.mesh_factory = config, rank_info, mesh_factory
        self.number = mesh_factory.epoch if mesh_factory is not None else 0
        self.communicators: dict[int, _native.Communicator] = {}
        self.served: dict[int, _native.ResilientComm | None] = {}
        self.cost: dict[str, float] = {}
        self.recorder: _native.Recorder | None = None
        self._notify, self._stack_probe = notify, stack_probe
        # Sockets that the core owns, as (descriptor, inode), by communicator id.
        self._sockets: dict[int, list[tuple[int, int]]] = {}
        self._heartbeat: _native.Heartbeat | None = None
        self._meshes: dict[int, LinkDescriptors] = {}  # linked, but not opened yet

    def link(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        mesh_factory: MeshFactory | None = None,
    ) -> None:
        """Connects the ranks of communicator `number`. All of `ranks` must call it.

        Raises:
            StartupError, PeerLost: some ranks could not be reached.
        """
        mesh_factory = mesh_factory or self.mesh_factory
        if mesh_factory is None:
            mesh = LinkDescriptors(
                doorbell=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            )
        else:
            mesh = mesh_factory.build(number, ranks, name, control=number == 0)
        self._meshes[number] = mesh
        self._sockets[number] = mesh.sockets()
        if mesh.control:
            # The heartbeat must start before the other communicators are connected:
            # peers that hear no heartbeat in the meantime would declare this rank lost.
            control, mesh.control = mesh.control, []
            self._heartbeat = self._make_heartbeat(control, mesh.control_keys)

    def _make_heartbeat(
        self, control: Sequence[tuple[int, int]], keys: list[bytes]
    ) -> _native.Heartbeat:
        assert self.mesh_factory is not None
        names = (member.hello.get("hostname") for member in self.mesh_factory.members)
        probe = self._stack_probe
        heartbeat = _native.Heartbeat(
            self.rank_info.rank,
            control,
            interval=self.config.heartbeat,
            timeout=self.config.failure_timeout,
            notify=self._notify,
            inquire=-1 if probe is None else probe.wakeup_fd,
            hosts=[str(name or "") for name in names],
            **({"keys": keys} if any(keys) else {}),
        )
        if probe is not None:
            probe.register(heartbeat)
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
        """Makes a communicator from the links that `link` has connected.

        Args:
            number: the id of the communicator.
            ranks: ranks of the world, in the order of the communicator.
            name: names the communicator in errors.
            resilient: the resilient communicator to which it belongs; None in a static
                job.
            config: other settings than those of the epoch.
            watched: whether the heartbeat aborts it when a peer is lost, and learns of
                its failures.
            ending: a communicator on which its calls wait for the calls of other
                replica sets.
            served: whether it serves calls of the program.
        """
        config, mesh = config or self.config, self._meshes.pop(number)
        job = int(self.mesh_factory.job, 16) if self.mesh_factory is not None else 0
        communicator = _native.Communicator(
            id=number,
            name=name,
            job=job,
            epoch=self.number,
            rank=list(ranks).index(self.rank_info.rank),
            hosts=[self.rank_info.hosts[rank] for rank in ranks],
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
                "process_set": process_set_of(number),
                "device_index": device_index_of(number),
                "eager": number & EAGER_LANE,
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
        """Links and opens a communicator. All of `ranks` must call it."""
        self.link(number, ranks, name)
        return self.open(number, ranks, name)

    def link_small(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        mesh_factory: MeshFactory | None = None,
    ) -> Config:
        """Like `link`, with small buffers. Returns the settings for `open`."""
        mesh_factory = mesh_factory or self.mesh_factory
        if mesh_factory is None:
            self.link(number, ranks, name)
            return self.config
        small = dataclasses.replace(
            mesh_factory.config,
            ring_bytes=_CONTROL_RING_BYTES,
            tile_bytes=0,
            tcp_streams=1,
            algorithm="",
        )
        self.link(number, ranks, name, dataclasses.replace(mesh_factory, config=small))
        return small

    def disconnect(self, number: int) -> None:
        """Closes a communicator, or the links of one that was not opened, if any."""
        if (mesh := self._meshes.pop(number, None)) is not None:
            mesh.close()
        communicator = self.communicators.pop(number, None)
        if communicator is not None:
            if self._heartbeat is not None:
                self._heartbeat.forget(communicator)
            communicator.close()
        self.served.pop(number, None)
        self._sockets.pop(number, None)

    def completed_calls(self, number: int) -> int:
        """Returns how many calls a communicator has completed."""
        communicator = self.communicators.get(number)
        every = communicator.stats().values() if communicator is not None else ()
        return sum(int(stats.get("calls", 0)) for stats in every)

    @property
    def heartbeat(self) -> _native.Heartbeat | None:
        """The heartbeat; None if this rank is the only one, or after `close`."""
        return self._heartbeat

    @property
    def members(self) -> Sequence[Member]:
        """The members of the epoch, by rank; empty if this rank is the only one."""
        return [] if self.mesh_factory is None else self.mesh_factory.members

    def hostname_of(self, rank: int) -> str:
        """Returns the host name that a rank has sent; "" if it sent none."""
        if rank >= len(self.members):
            return ""
        return str(self.members[rank].hello.get("hostname") or "")

    def lost(self) -> list[tuple[int, str]]:
        """Returns the lost ranks, in the order of the losses, each with the reason."""
        return [] if self._heartbeat is None else self._heartbeat.lost()

    def fail(self, text: str) -> None:
        """Sends all peers a message that this rank fails, with the reason."""
        if self._heartbeat is not None:
            self._heartbeat.fail(text)

    def leave(self) -> None:
        """Sends all peers a message that this rank leaves in good order."""
        if self._heartbeat is not None:
            self._heartbeat.leave()

    def abort(self, text: str, rank: int) -> None:
        """Fails all pending calls with an error that names `rank`."""
        for communicator in list(self.communicators.values()):
            communicator.abort(text, rank)

    def close(self) -> None:
        """Closes all objects of the epoch, also if it is only partly connected."""
        heartbeat, self._heartbeat = self._heartbeat, None
        # Copies: the program's thread may be adding links at the same time, which fail
        # because the epoch is over.
        for communicator in list(self.communicators.values()):
            if heartbeat is not None:
                heartbeat.forget(communicator)
            communicator.close()
        if heartbeat is not None:
            heartbeat.close()
            if self._stack_probe is not None:
                self._stack_probe.unregister(heartbeat)
        for mesh in list(self._meshes.values()):
            mesh.close()
        # The core closes its descriptors when the last reference to an object is gone.
        self.communicators.clear()
        self.served.clear()
        self._meshes.clear()
        self._sockets.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets, and nothing else."""
        for sockets in self._sockets.values():
            for fd, inode in sockets:
                with contextlib.suppress(OSError):
                    # The core may have closed the socket before the fork, and another
                    # file may have got its number. The inode tells them apart.
                    if os.fstat(fd).st_ino == inode:
                        os.close(fd)
