"""The live state of one `init`: membership, links, heartbeat, communicators.

It is formed from the settings and the environment, adds and removes communicators of
process sets, and ends in good order, with a failure, or by being forgotten in a forked
child. What users call is in runtime.py; who finds whom is in meeting.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from . import _native, calibration, horovod_variables, lanes, launch, nccl
from . import addresses as address
from .config import LOG_LEVELS, Config, horovod_names
from .errors import Mismatch, StartupError
from .meeting import Meeting, attend
from .mesh import Fabric, Mesh
from .reception import Reception
from .session import Member
from .standing import Standing

# What ranks must agree about for their links and algorithms to fit together.
_AGREED = ["ring_bytes", "tile_bytes", "tcp_streams", "algorithm", "calibrate"]
_AGREED += ["fusion_threshold", "group_fusion", "cache_capacity"]
_SMALL_RING = 1 << 14  # of a control communicator; the least that RING_BYTES may be
_CLOSED = "ringjax.shutdown() was called on this rank"


class World:
    """All ranks of the job, as this one is connected with them.

    Raises:
        StartupError, PeerLost: the job could not be brought together.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.failed = ""  # why this rank fails, once it does
        self.communicators: dict[int, _native.Communicator] = {}
        # What the core holds, by communicator: numbers and inodes of the sockets.
        self._sockets: dict[int, list[tuple[int, int]]] = {}
        self._heartbeat: _native.Heartbeat | None = None
        self._reception: Reception | None = None
        self._meeting: Meeting | None = None
        self._fabric: Fabric | None = None
        # The process sets and their ranks, also those without this rank.
        self._sets: dict[int, list[int]] = {}
        self._cost: dict[str, float] = {}  # of the links, as it was measured
        self.devices = nccl.Devices(self, [0])
        self.lanes = lanes.Lanes(self)
        place = launch.find(config)
        self._prefix = f"ringjax {place.rank}/{place.size}"
        if place.rank == 0:
            for note in horovod_variables.notes(horovod_names()):
                self.log("info", note)
        try:
            if place.size == 1:
                self.standing = Standing.of(0, ["here"], config)
            else:
                self._come_together(place)
            self._calibrate(self.connect(0, range(place.size), "world"))
            self._sets[0] = list(range(place.size))
            self.devices = nccl.Devices(self, self._count_devices())
            self.lanes.add(0, self._sets[0], "world")
            self.lanes.open_timeline()
        except BaseException:
            self.close()
            raise

    def _come_together(self, place: launch.Place) -> None:
        config = self.config
        try:
            hosts = (
                ["127.0.0.1"]
                if place.one_host
                else address.of_interfaces(config.network_interfaces)
            )
        except ValueError as error:
            raise StartupError(f"RINGJAX_NETWORK_INTERFACES: {error}") from None
        hello = {
            "rank": place.rank,
            "size": place.size,
            "version": _native.version(),
            "hostname": config.hostname or socket.gethostname(),
            "machine": _machine(),
            "shm": config.shm,
            "cuda": nccl.count(config),
            "settings": {name: getattr(config, name) for name in _AGREED},
        }
        self._meeting = attend(
            place, config, hello, lambda s, j: self._open(s, j, place, hosts)
        )
        members = self._meeting.session.members
        _check_agreement(members)
        names = [f"{m.hello.get('machine')} {m.hello.get('hostname')}" for m in members]
        self.standing = Standing.of(place.rank, names, config)
        self._prefix += f" e{self._meeting.session.epoch}"
        assert self._reception is not None
        self._fabric = Fabric(
            rank=place.rank,
            members=members,
            hosts=self.standing.hosts,
            epoch=self._meeting.session.epoch,
            job=self._meeting.job,
            secret=self._meeting.secret,
            config=config,
            reception=self._reception,
            session=self._meeting.session,
            shm_bytes=_native.shm_bytes,
            board_bytes=_native.board_bytes,
            log=self.log,
        )

    def _open(
        self, secret: bytes, job: str, place: launch.Place, hosts: list[str]
    ) -> dict[str, Any]:
        """Opens the doors for the other ranks, before they can know about them."""
        if self._reception is not None:
            self._reception.close()
        self._reception = Reception(
            secret,
            job,
            rank=place.rank,
            size=place.size,
            hosts=hosts,
            log=lambda text: self.log("warning", text),
        )
        return {
            "door": self._reception.door,
            "addresses": ",".join(self._reception.addresses),
        }

    @property
    def rank(self) -> int:
        """This rank."""
        return self.standing.rank

    def connect(
        self,
        number: int,
        ranks: Sequence[int],
        name: str,
        fabric: Fabric | None = None,
    ) -> _native.Communicator:
        """Builds a communicator; all of `ranks` do it, and this is one of them."""
        standing, config = self.standing, self.config
        fabric = fabric or self._fabric
        if fabric is None:
            mesh = Mesh(doorbell=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            job, epoch = 0, 0
        else:
            mesh = fabric.build(number, ranks, name, control=number == 0)
            job, epoch = int(fabric.job, 16), fabric.epoch
            config = fabric.config
        self._sockets[number] = mesh.sockets()
        communicator = _native.Communicator(
            id=number,
            name=name,
            job=job,
            epoch=epoch,
            rank=list(ranks).index(standing.rank),
            hosts=[standing.hosts[rank] for rank in ranks],
            members=list(ranks),
            links=mesh.links,
            doorbell=mesh.doorbell,
            board=mesh.board,
            options={
                "ring_bytes": config.ring_bytes,
                "spin_us": config.spin_us,
                "stall_warning": config.stall_warning,
                "collective_timeout": config.collective_timeout,
                "algorithm": config.algorithm,
                "cost": self._cost,
            },
        )
        self.communicators[number] = communicator
        if mesh.control:
            self._heartbeat = _native.Heartbeat(
                standing.rank,
                mesh.control,
                interval=config.heartbeat,
                timeout=config.failure_timeout,
            )
        if self._heartbeat is not None:
            self._heartbeat.watch(communicator)
        return communicator

    def _calibrate(self, world: _native.Communicator) -> None:
        if self._meeting is None or self.config.calibrate == "off":
            return
        members = self._meeting.session.members
        network = calibration.describe(members, self.standing.hosts)
        if network is None:
            return
        self._cost, how = calibration.calibrate(world, self.config, network)
        costs = ", ".join(f"{name} {value:.3g}" for name, value in self._cost.items())
        self.log("debug", f"the links, {how}: {costs}")

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """A communicator for messages of a few bytes, beside a device communicator."""
        if self._fabric is None:
            return self.connect(number, ranks, name)
        small = dataclasses.replace(
            self.config,
            ring_bytes=_SMALL_RING,
            tile_bytes=0,
            tcp_streams=1,
            algorithm="",
        )
        fabric = dataclasses.replace(self._fabric, config=small)
        return self.connect(number, ranks, name, fabric)

    def disconnect(self, number: int) -> None:
        """Ends a communicator, if there is one."""
        communicator = self.communicators.pop(number, None)
        if communicator is not None:
            if self._heartbeat is not None:
                self._heartbeat.forget(communicator)
            communicator.close()
        self._sockets.pop(number, None)

    def _count_devices(self) -> list[int]:
        """Of each rank; all alike know whether there is anything to talk about."""
        if self._meeting is None:
            counts = [nccl.count(self.config)]
        else:
            members = self._meeting.session.members
            counts = [int(m.hello.get("cuda", 0)) for m in members]
        mine, local = counts[self.rank], self.standing.local_size
        if mine and local > mine:
            self.log(
                "info",
                f"{local} ranks of this host share {mine} CUDA device(s): let JAX take "
                "a part of the memory only (XLA_PYTHON_CLIENT_MEM_FRACTION)",
            )
        return counts

    @property
    def cuda_absence(self) -> str:
        """Why this rank has no CUDA device; nothing if its driver shows one."""
        return "" if self.devices.counts[self.rank] else nccl.absence(self.config)

    @property
    def cuda_for_lanes(self) -> dict[str, Any] | None:
        """What a lane needs to take CUDA tensors; None where no rank has a device."""
        if not self.devices.possible:
            return None
        have = self.devices.counts[self.rank]
        return nccl.lane_options(self.config, self.device_share or 0 if have else -1)

    @property
    def device_share(self) -> int | None:
        """The CUDA device that falls to this rank, None if there is no choice."""
        standing, counts = self.standing, self.devices.counts
        return nccl.share(standing.local_rank, standing.local_size, counts[self.rank])

    def open_devices(self, device: int, why_not: str = "") -> None:
        """Builds the device communicators, once; collective over the world.

        Args:
            device: the number of the CUDA device that this rank computes on, -1 if it
                computes on none, because of `why_not`.

        Raises:
            StartupError: the ranks do not fit together, or NCCL failed.
        """
        self.devices.open(device, why_not, self._sets)

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Registers a process set; collective over the world.

        Raises:
            Mismatch: ranks disagree about the set. Nothing was registered.
        """
        self._agree(f"{what} {number}", ranks)
        try:
            if self.rank in ranks:
                for build in (self.connect, self.lanes.add):
                    build(number, ranks, f"process set {number}")
            self.devices.add(number, ranks)
        except BaseException:
            self.lanes.remove(number)
            self.disconnect(number)
            raise
        self._sets[number] = list(ranks)

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Ends a process set; collective over the world."""
        self._agree(f"{what} {number}", ranks)
        self._sets.pop(number, None)
        self.devices.remove(number)
        self.lanes.remove(number)
        self.disconnect(number)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives every rank the values of all ranks; `what` names it in errors."""
        if self._meeting is None:
            return [value]
        session = self._meeting.session
        return session.exchange(value, self.config.start_timeout, what)

    def gone(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""
        return {} if self._meeting is None else self._meeting.session.gone()

    def _agree(self, what: str, ranks: Sequence[int]) -> None:
        if self._meeting is None:
            return
        text = str(list(ranks[:32])) + ("..." if len(ranks) > 32 else "")
        digest = hashlib.sha256(str(list(ranks)).encode()).hexdigest()[:16]
        mine = f"{what} {text} {digest}"
        for rank, other in enumerate(self.exchange(mine, f"ringjax.{what}")):
            if other != mine:
                raise Mismatch(
                    f"ringjax.{what} of ranks {text}: rank {rank} calls "
                    f"{str(other)[:-17]}"
                )

    def fail(self, text: str) -> None:
        """Tells everybody that this rank goes down, and why."""
        if self.failed:
            return
        self.failed = text
        if self._heartbeat is not None:
            self._heartbeat.fail(text)
        if self._meeting is not None:
            self._meeting.session.report_failure(text)

    def stop(self) -> None:
        """Fails what is pending, so that nothing waits for it."""
        text = self.failed or _CLOSED
        self.devices.stop(text, self.rank)
        for communicator in self.communicators.values():
            communicator.abort(text, self.rank)

    def close(self) -> None:
        """Leaves the job. Bounded in time; may be called on half of a world."""
        heartbeat, meeting = self._heartbeat, self._meeting
        self.devices.close()  # first: what the devices still do needs all ranks
        self.lanes.close()
        if heartbeat is not None and not self.failed:
            heartbeat.leave()
        if meeting is not None and not self.failed:
            meeting.session.leave()
        for communicator in self.communicators.values():
            if heartbeat is not None:
                heartbeat.forget(communicator)
            communicator.close()
        if heartbeat is not None:
            heartbeat.close()
        if self._reception is not None:
            self._reception.close()
        if meeting is not None:
            meeting.close()
        # The core closes its descriptors when nobody refers to its objects any more.
        self.communicators.clear()
        self._sockets.clear()
        self._heartbeat = self._reception = self._meeting = self._fabric = None

    def abandon(self) -> None:
        """In a forked child: lets go of the sockets and of nothing else.

        Copies of them here would hide the parent's death from its peers. The threads of
        the core do not exist in the child, so its objects must never be closed.
        """
        _abandoned.append(self)
        for sockets in self._sockets.values():
            for fd, inode in sockets:
                with contextlib.suppress(OSError):
                    # The core may have closed it, and the number be somebody else's.
                    if os.fstat(fd).st_ino == inode:
                        os.close(fd)
        if self._reception is not None:
            self._reception.release()
        if self._meeting is not None:
            self._meeting.release()

    def log(self, level: str, text: str) -> None:
        """One line on standard error, if the level is wanted."""
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.config.log_level):
            print(f"[{self._prefix}] {level}: {text}", file=sys.stderr, flush=True)


_abandoned: list[object] = []


def _machine() -> str:
    """What two processes share if a unix socket of one can be reached by the other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _check_agreement(members: Sequence[Member]) -> None:
    """Every rank sees all, so every rank raises the same."""
    first = members[0].hello
    for member in members[1:]:
        if member.hello.get("version") != first.get("version"):
            raise StartupError(
                f"rank {member.rank} runs ringjax {member.hello.get('version')}, "
                f"rank 0 {first.get('version')}"
            )
        mine, theirs = first.get("settings", {}), member.hello.get("settings", {})
        for name in _AGREED:
            if mine.get(name) != theirs.get(name):
                raise StartupError(
                    f"RINGJAX_{name.upper()} must be alike on all ranks: it is "
                    f"{mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank "
                    f"{member.rank}"
                )
