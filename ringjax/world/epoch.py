"""Epoch: the links, the heartbeat and the communicators of one set of members.

An epoch is built with a `LinkFactory`, which connects its members, and ends as a whole.
epoch_sequence.py decides when an epoch begins and which epoch follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ringjax import _native
from ringjax.config import Config
from ringjax.control.member import Member
from ringjax.errors import OutOfDescriptors, PeerLost, Unreachable, from_code
from ringjax.links import fabric
from ringjax.links.descriptors import LinkDescriptors
from ringjax.links.factory import LinkFactory
from ringjax.links.kept_connections import KeptConnections
from ringjax.world.communicator_ids import EAGER_LANE, device_index_of, process_set_of
from ringjax.world.rank_info import RankInfo
from ringjax.world.stack_probe import StackProbe

_CONTROL_RING_BYTES = 1 << 14  # the minimum of RINGJAX_RING_BYTES


@dataclass(frozen=True)
class _UntilStopped:
    """Makes `LinkFactory.connect` fail when the communicator is aborted."""

    stopped: Callable[[], bool]

    def departed_ranks(self) -> dict[int, str]:
        if self.stopped():
            raise PeerLost("the communicator was aborted")
        return {}


@dataclass(eq=False)
class Epoch:
    """The native objects of one epoch. Its dictionaries have communicator ids as keys.

    `notify` is an eventfd that the heartbeat writes to when a peer is lost, or -1 in a
    static job. `cost` has the measured parameters of the cost model. Communicators that
    are opened later use `cost` and `recorder`.
    """

    config: Config
    rank_info: RankInfo
    link_factory: LinkFactory | None = None  # None if this rank is the only one
    notify: int = -1
    stack_probe: StackProbe | None = None
    cost: dict[str, float] = field(default_factory=dict)
    recorder: _native.Recorder | None = None
    # Whether compiled programs find the communicators by their ids.
    registered: bool = True
    communicators: dict[int, _native.Communicator] = field(default_factory=dict)
    # The communicators on which the program's calls run, each with its resilient
    # communicator, or with None in a static job.
    served: dict[int, _native.ResilientComm | None] = field(default_factory=dict)
    heartbeat: _native.Heartbeat | None = None  # None without peers, and after `close`
    # Sockets that the core owns, as (descriptor, inode).
    _sockets: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    # The links of communicators that are connected but not opened yet, and the factory.
    _links: dict[int, tuple[LinkDescriptors, LinkFactory | None]] = field(
        default_factory=dict
    )

    @property
    def number(self) -> int:
        """The number of the epoch, from 0."""
        return 0 if self.link_factory is None else self.link_factory.epoch

    def link(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        link_factory: LinkFactory | None = None,
    ) -> None:
        """Connects the ranks of communicator `number`. All of `ranks` must call it.

        Raises:
            StartupError, PeerLost: some ranks could not be reached.
        """
        link_factory = link_factory or self.link_factory
        links = LinkDescriptors()
        if link_factory is not None:
            links = link_factory.build(number, ranks, name, control=number == 0)
        self._links[number] = links, link_factory
        self._sockets[number] = links.sockets()
        if links.control:
            # Start the heartbeat before the other communicators are connected.
            # Otherwise peers, which would receive no heartbeat meanwhile, would declare
            # this rank lost.
            control, links.control = links.control, []
            self.heartbeat = self._make_heartbeat(control, links.control_keys)

    def _connector(
        self, factory: LinkFactory, number: int, ranks: Sequence[int], name: str
    ) -> _native.Connect:
        """Returns the function that connects communicator `number` to further ranks."""

        def connect(peers: list[int], stopped: Callable[[], bool]) -> _native.Connected:
            watch = _UntilStopped(stopped)
            try:
                links = dataclasses.replace(factory, loss_monitor=watch).connect(
                    number, ranks, name, [ranks[peer] for peer in peers]
                )
            except OutOfDescriptors as error:
                own = ranks.index(self.rank_info.rank)
                return [], own, f"lacks descriptors: {error}"
            except (PeerLost, Unreachable) as error:
                lost = [*getattr(error, "ranks", []), getattr(error, "rank", -1)]
                culprit = next((ranks.index(r) for r in lost if r in ranks), peers[0])
                return (
                    [],
                    culprit,
                    f"has no link to rank {self.rank_info.rank}: {error}",
                )
            self._sockets.setdefault(number, []).extend(links.sockets())
            return links.links, -1, ""

        return connect

    def _make_heartbeat(
        self, control: Sequence[tuple[int, int]], keys: list[bytes]
    ) -> _native.Heartbeat:
        assert self.link_factory is not None
        names = [member.hostname for member in self.link_factory.members]
        probe = self.stack_probe
        heartbeat = _native.Heartbeat(
            self.rank_info.rank,
            names,
            control,
            interval=self.config.heartbeat,
            timeout=self.config.failure_timeout,
            notify=self.notify,
            inquire=-1 if probe is None else probe.wakeup_fd,
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
        process_set: int | None = None,
    ) -> _native.Communicator:
        """Makes communicator `number` from links that the method `link` has connected.

        Args:
            ranks: ranks of the world, in the order of the communicator.
            name: names the communicator in errors.
            resilient: the resilient communicator to which the new communicator belongs;
                None in a static job.
            config: settings that replace those of the epoch.
            watched: whether the heartbeat aborts the communicator when a peer is lost,
                and reports a failure of the communicator to all peers.
            ending: the communicator CALL_END, for the communicator of a replica set.
            served: whether the communicator serves calls of the program.
            process_set: the id that records show; None: that of the process set which
                the communicator serves.
        """
        if process_set is None:
            process_set = process_set_of(number)
        config = config or self.config
        links, factory = self._links.pop(number)
        connect = by_fabric = None
        if factory is not None:
            by_fabric = fabric.options(factory.config, self.rank_info.local_rank)
            connect = self._connector(factory, number, ranks, name)
        job = int(self.link_factory.job, 16) if self.link_factory is not None else 0
        with self._fabric_errors(ranks, name):
            communicator = _native.Communicator(
                id=number,
                name=name,
                job=job,
                epoch=self.number,
                rank=list(ranks).index(self.rank_info.rank),
                hosts=[self.rank_info.hosts[rank] for rank in ranks],
                members=list(ranks),
                links=links.links,
                memory=links.memory,
                doorbell=links.name,
                connect=connect,
                options={
                    "ring_bytes": config.ring_bytes,
                    "spin_us": config.spin_us,
                    "stall_warning": config.stall_warning,
                    "collective_timeout": config.collective_timeout,
                    "algorithm": config.algorithm,
                    "cost": self.cost,
                    "process_set": process_set,
                    "device_index": device_index_of(number),
                    "eager": number & EAGER_LANE,
                    **({} if self.recorder is None else {"recorder": self.recorder}),
                },
                fabric=by_fabric,
                resilient=resilient,
                ending=ending,
                **({} if self.registered else {"registered": False}),
            )
        if (fd := communicator.doorbell_socket) >= 0:
            self._sockets.setdefault(number, []).append((fd, os.fstat(fd).st_ino))
        self.communicators[number] = communicator
        if served:
            self.served[number] = resilient
        if watched and self.heartbeat is not None:
            sharing = links.memory[3] if links.memory and number == 0 else []
            self.heartbeat.watch(communicator, sharing)
        return communicator

    @contextlib.contextmanager
    def _fabric_errors(self, ranks: Sequence[int], name: str) -> Iterator[None]:
        """Converts the failure of a fabric's links to the errors of `link`.

        Only these links exchange messages while the core makes a communicator. So a
        peer may be lost meanwhile, after which an elastic job begins another epoch.
        """
        try:
            yield
        except _native.StatusError as error:
            if not fabric.is_wanted(self.config):
                raise
            lost = ranks[error.rank] if 0 <= error.rank < len(ranks) else -1
            named = lost if lost >= 0 else self.rank_info.rank
            text = f"{name}: rank {named} {error}"
            raise from_code(error.code, text, lost) from error

    def connect(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        process_set: int | None = None,
    ) -> _native.Communicator:
        """Links and opens a communicator. Every rank in `ranks` must call it."""
        self.link(number, ranks, name)
        return self.open(number, ranks, name, process_set=process_set)

    def link_small(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        link_factory: LinkFactory | None = None,
    ) -> Config:
        """Connects ranks like `link`, with small buffers. Returns `open`'s settings.

        The links do not use RINGJAX_FABRIC: an endpoint of libfabric takes megabytes,
        which the short messages on these links are not worth.
        """
        link_factory = link_factory or self.link_factory
        if link_factory is None:
            self.link(number, ranks, name)
            return self.config
        small = dataclasses.replace(
            link_factory.config,
            ring_bytes=_CONTROL_RING_BYTES,
            tile_bytes=0,
            tcp_streams=1,
            fabric="off",
            algorithm="",
        )
        self.link(number, ranks, name, dataclasses.replace(link_factory, config=small))
        return small

    def disconnect(self, number: int) -> None:
        """Closes a communicator, or its links if the communicator was never opened."""
        if number in self._links:
            self._links.pop(number)[0].close()
        communicator = self.communicators.pop(number, None)
        if communicator is not None:
            if self.heartbeat is not None:
                self.heartbeat.forget(communicator)
            communicator.close()
        self.served.pop(number, None)
        self._sockets.pop(number, None)

    def completed_calls(self, number: int) -> int:
        """Returns how many calls of a communicator are complete."""
        communicator = self.communicators.get(number)
        every = communicator.stats().values() if communicator is not None else ()
        return sum(int(stats.get("calls", 0)) for stats in every)

    @property
    def members(self) -> Sequence[Member]:
        """The members of the epoch, by rank; empty in a job of one process."""
        return [] if self.link_factory is None else self.link_factory.members

    def hostname_of(self, rank: int) -> str:
        """Returns the host name that a rank has sent; "" if the rank sent none."""
        return self.members[rank].hostname if rank < len(self.members) else ""

    def lost(self) -> list[tuple[int, str]]:
        """Returns the lost ranks with the causes, in the order of the losses."""
        return [] if self.heartbeat is None else self.heartbeat.lost()

    def fail(self, text: str) -> None:
        """Sends all peers a message that this rank fails, with the cause `text`."""
        if self.heartbeat is not None:
            self.heartbeat.fail(text)

    def release(self, kept: KeptConnections) -> None:
        """Ends the heartbeat, and keeps its connections for the next epoch."""
        if self.heartbeat is not None and self.link_factory is not None:
            make = self.link_factory.control_connection
            for rank, fd, received, unsent in self.heartbeat.release():
                kept.add(make(rank, socket.socket(fileno=fd), received, unsent))

    def leave(self) -> None:
        """Sends all peers a message that this rank leaves in good order."""
        if self.heartbeat is not None:
            self.heartbeat.leave()

    def abort(self, text: str, rank: int) -> None:
        """Fails all pending calls with an error that names `rank`."""
        for communicator in list(self.communicators.values()):
            communicator.abort(text, rank)

    def close(self) -> None:
        """Closes all objects of the epoch, even if some are not connected yet."""
        heartbeat, self.heartbeat = self.heartbeat, None
        # Iterate over copies, because the program's thread may be adding links at the
        # same time. These links fail, because the epoch is over.
        for communicator in list(self.communicators.values()):
            if heartbeat is not None:
                heartbeat.forget(communicator)
            communicator.close()
        if heartbeat is not None:
            heartbeat.close()
            if self.stack_probe is not None:
                self.stack_probe.unregister(heartbeat)
        for links, _ in list(self._links.values()):
            links.close()
        # The core closes its descriptors when the last reference to an object is gone.
        self.communicators.clear()
        self.served.clear()
        self._links.clear()
        self._sockets.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets, and no other object."""
        for sockets in self._sockets.values():
            for fd, inode in sockets:
                with contextlib.suppress(OSError):
                    # The core may have closed the socket before the fork. Then another
                    # file may have the same descriptor, but not the same inode.
                    if os.fstat(fd).st_ino == inode:
                        os.close(fd)
