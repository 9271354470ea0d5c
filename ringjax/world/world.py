"""The live state of one `init`: membership, links, heartbeat, communicators.

It is formed from the settings and the environment, adds and removes communicators of
process sets, and ends in good order, with a failure, or by being forgotten in a forked
child. What users call is in runtime/; who finds whom is in
membership/rendezvous_lookup.py; a world whose ranks come and go is in
recovery/elastic_world.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ringjax import _native, stderr
from ringjax.config import LOG_LEVELS, Config, horovod_names
from ringjax.control import addresses as address
from ringjax.control import launch_environment
from ringjax.control.listener import Reception
from ringjax.control.member import Member
from ringjax.errors import Mismatch, from_status
from ringjax.links import calibration
from ringjax.links.mesh import Fabric
from ringjax.membership.client import CoordinatorClient
from ringjax.membership.rendezvous_lookup import Meeting, attend
from ringjax.settings import horovod_variables
from ringjax.settings.misspelt import misspelt
from ringjax.world import devices, groups, lanes, record
from ringjax.world.coordinates import Standing
from ringjax.world.epoch import Epoch
from ringjax.world.introduction import (
    check_agreement,
    hello,
    host_names,
    listening_hosts,
)
from ringjax.world.profiling import Recording
from ringjax.world.report import Reporter, to_standard_error
from ringjax.world.telling import Teller
from ringjax.world.whereabouts import Whereabouts

_told: set[str] = set()  # each once, however often ringjax is initialised
_CLOSED = "ringjax.shutdown() was called on this rank"


class World:
    """All ranks of the job, as this one is connected with them.

    Raises:
        StartupError, PeerLost: the job could not be brought together.

    Attributes:
        standing: this rank's coordinates.
        sets: the process sets and their ranks, also those without this rank.
        failed: why this rank fails, once it does.
        recorder: has heard of all calls since `init`.
        tuned: what autotune has found out; rank 0 tells of it in reports.
        group: those that JAX joins this process with.
    """

    elastic = False
    recorder: _native.Recorder

    def __init__(self, config: Config) -> None:
        self.config = config
        self.failed = self.tuned = ""
        self.sets: dict[int, list[int]] = {}
        self.group = groups.Group(config.group_size)
        self._epoch: Epoch | None = None
        self._reception: Reception | None = None
        self._meeting: Meeting | None = None
        self.secret = b""  # a job of one has none
        self._whereabouts: Whereabouts | None = None
        self._telling: Reporter | Teller | None = None
        self._recording: Recording | None = None
        self.devices = devices.Devices(self, [0])
        self.lanes = lanes.Lanes(self)
        place = launch_environment.find(config)
        self._prefix = f"ringjax {place.rank}/{place.size}"
        if place.rank == 0:
            for note in horovod_variables.notes(horovod_names()):
                self.log("info", note)
            for note in misspelt():
                if note not in _told:
                    self.log("warning", note)
                    _told.add(note)
        try:
            self._begin(place)
        except BaseException:
            self.close()
            raise

    def _begin(self, place: launch_environment.Place) -> None:
        """Brings the job together."""
        fabric = None
        self.group.check(place.size)
        if place.size == 1:
            self.standing = Standing.of(0, ["here"], self.config)
        else:
            fabric = self._come_together(place)
            self._whereabouts = Whereabouts(self.log)
        self._epoch = Epoch(
            self.config, self.standing, fabric, whereabouts=self._whereabouts
        )
        job = "" if fabric is None else fabric.job
        self.begin_recording(f"rank {place.rank}", job)
        self._epoch.recorder = self.recorder
        self._calibrate(self.connect(0, range(place.size), "world"))
        self.sets[0] = list(range(place.size))
        self.devices = devices.Devices(self, self._count_devices())
        self.lanes.add(0, self.sets[0], "world")
        self.group.gather(self.members, place.rank)
        if self.group.mates:
            self.connect(groups.REPLICAS, self.group.replicas, "replica set")
        self.lanes.open_timeline()
        self.open_profile()

    def begin_recording(self, who: str, job: str) -> None:
        """Calls are heard of from now on, and told to who wants to know."""
        config = self.config
        self.recorder = record.recorder(config, who, job)
        if config.monitor:
            own = config.rank if config.worker is None else config.worker
            self._telling = Teller(self, config.monitor, own or 0)
        elif config.report > 0:
            self._telling = Reporter(self, config.report, to_standard_error)
        self._named = (who, job[:8] or "alone")

    def begin_profile(
        self, directory: str, *, steps: int = 0, jax_trace: bool | None = None
    ) -> Recording:
        """Begins this rank's part of a profile; one that runs comes to its end.

        Raises:
            OSError: nothing can be written there.
        """
        self.end_profile()
        who, run = self._named
        self._recording = Recording(
            *(self, Path(directory), run, who), steps=steps, jax_trace=jax_trace
        )
        return self._recording

    def end_profile(self) -> None:
        """Writes what is left of it. May be called twice."""
        if self._recording is not None:
            self._recording.end()

    def open_profile(self) -> None:
        """Begins the one that the settings ask for; the job does not depend on it."""
        if not self.config.profile or self._recording is not None:
            return
        try:
            self.begin_profile(self.config.profile)
        except OSError as error:
            self.log("warning", f"no profile of {self._named[0]}: {error}")

    def end_telling(self) -> None:
        """Last words about the calls of this rank. May be called twice."""
        if self._telling is not None:
            self._telling.close()

    @property
    def present_epoch(self) -> Epoch | None:
        """The one in force; None: there is none, or none yet."""
        return self._epoch

    def _meet(self, place: launch_environment.Place, described: dict[str, Any]) -> None:
        """Joins the job; `described`: what the others shall know about this rank.

        Raises:
            StartupError: the job did not come together.
        """
        config = self.config

        def open_doors(secret: bytes, job: str) -> dict[str, Any]:
            """For the other ranks, before they can know about them."""
            if self._reception is not None:
                self._reception.close()
            rank, size, one_host = place.rank, place.size, place.one_host
            if config.elastic:  # rank and hosts may be others in the next epoch
                found = address.parse(config.rendezvous)
                one_host = all(address.is_loopback(host) for host, _ in found)
                rank, size = -1, 0
            self._reception = Reception(
                secret,
                job,
                rank=rank,
                size=size,
                hosts=listening_hosts(config, one_host=one_host),
                log=lambda text: self.log("warning", text),
                failed=self.broken,
                tls=config.tls,
            )
            return self._reception.described()

        described = hello(place.rank, place.size, config) | described
        say = partial(self.log, "warning")
        self._meeting = attend(place, config, described, open_doors, say)
        self.secret = self._meeting.secret

    def _come_together(self, place: launch_environment.Place) -> Fabric:
        config = self.config
        self._meet(place, self.group.offer(place.rank))
        assert self._meeting is not None and self._reception is not None
        client = self._meeting.client
        check_agreement(client.members)
        self.standing = Standing.of(place.rank, host_names(client.members), config)
        self._prefix += f" e{client.epoch}"
        return Fabric(
            rank=place.rank,
            members=client.members,
            hosts=self.standing.hosts,
            epoch=client.epoch,
            job=self._meeting.job,
            secret=self._meeting.secret,
            config=config,
            reception=self._reception,
            session=client,
            shm_bytes=_native.shm_bytes,
            segment_bytes=_native.segment_bytes,
            log=self.log,
        )

    @property
    def client(self) -> CoordinatorClient | None:
        """Speaks with the coordinator; None in a job of one."""
        return None if self._meeting is None else self._meeting.client

    @property
    def rank(self) -> int:
        """This rank."""
        return self.standing.rank

    @property
    def members(self) -> Sequence[Member]:
        """All ranks, as they know each other; none in a job of one."""
        return [] if self.client is None else self.client.members

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """Those that this rank has now, by number."""
        return {} if self._epoch is None else self._epoch.communicators

    @property
    def epoch(self) -> Epoch:
        """The present one."""
        assert self._epoch is not None
        return self._epoch

    def connect(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Builds a communicator; all of `ranks` do it, and this is one of them."""
        return self.epoch.connect(number, ranks, name)

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """A communicator for messages of a few bytes, beside a device communicator."""
        return self.epoch.connect_small(number, ranks, name)

    def disconnect(self, number: int) -> None:
        """Ends a communicator, if there is one."""
        if self._epoch is not None:
            self._epoch.disconnect(number)

    def _calibrate(self, world: _native.Communicator) -> None:
        if not self.members or self.config.calibrate == "off":
            return
        network = calibration.describe(self.members, self.standing.hosts)
        if network is None:
            return
        cost, how = calibration.calibrate(world, self.config, network)
        self.epoch.cost = cost
        costs = ", ".join(f"{name} {value:.3g}" for name, value in cost.items())
        self.log("debug", f"the links, {how}: {costs}")

    def _count_devices(self) -> list[int]:
        """Of each rank; all alike know whether there is anything to talk about."""
        counts = [int(m.hello.get("cuda", 0)) for m in self.members]
        counts = counts or [devices.count(self.config)]
        mine, local = counts[self.rank], self.standing.local_size
        each = self.config.devices_per_rank or mine
        if mine and local > 1 and local * each > mine:
            self.log(
                "info",
                f"{local} ranks of this host share {mine} CUDA device(s): let JAX take "
                "a part of the memory only (XLA_PYTHON_CLIENT_MEM_FRACTION)",
            )
        return counts

    @property
    def cuda_absence(self) -> str:
        """Why this rank has no CUDA device; nothing if its driver shows one."""
        return "" if self.devices.counts[self.rank] else devices.absence(self.config)

    @property
    def cuda_for_lanes(self) -> dict[str, Any] | None:
        """What a lane needs to take CUDA tensors; None where no rank has a device."""
        if not self.devices.possible:
            return None
        have = self.devices.counts[self.rank]
        first = (self.device_share or (0,))[0]
        return devices.lane_options(self.config, first if have else -1)

    @property
    def device_share(self) -> tuple[int, ...] | None:
        """The CUDA devices that fall to this rank, None if there is no choice."""
        here, each = self.standing, self.config.devices_per_rank
        count = self.devices.counts[self.rank]
        return devices.share(here.local_rank, here.local_size, count, each)

    def open_devices(self, numbers: Sequence[int], why_not: str = "") -> None:
        """Builds the device communicators, once; collective over the world.

        Args:
            numbers: of the CUDA devices that this rank computes on; if there are none,
                because of `why_not`.

        Raises:
            StartupError: the ranks do not fit together, or NCCL failed.
        """
        self.devices.open(numbers, why_not, self.sets)

    def confirm(self) -> None:
        """Waits until all calls on devices have ended.

        Raises:
            PeerLost, RingjaxError: they have failed, and their results are void.
        """
        try:
            for communicator in self.devices.everyone():
                communicator.confirm()
            for lane in list(self.lanes.lanes.values()):
                lane.confirm()
        except _native.StatusError as error:
            raise from_status(error) from error

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Registers a process set; collective over the world.

        Raises:
            Mismatch: ranks disagree about the set. Nothing was registered.
        """
        self.agree(f"{what} {number}", ranks)
        try:
            if self.rank in ranks:
                for build in (self.connect, self.lanes.add):
                    build(number, ranks, f"process set {number}")
            self.devices.add(number, ranks)
        except BaseException:
            self.lanes.remove(number)
            self.disconnect(number)
            raise
        self.sets[number] = list(ranks)

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Ends a process set; collective over the world."""
        self.agree(f"{what} {number}", ranks)
        self.sets.pop(number, None)
        self.devices.remove(number)
        self.lanes.remove(number)
        self.disconnect(number)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives every rank the values of all ranks; `what` names it in errors."""
        if self.client is None:
            return [value]
        return self.client.exchange(value, self.config.start_timeout, what)

    def prepare(self, what: str) -> None:
        """Called before each collective; `what` names it."""

    def gone(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""
        return {} if self.client is None else self.client.gone()

    def agree(self, what: str, ranks: Sequence[int]) -> None:
        """All ranks say the same; raises Mismatch if one does not."""
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
        if self.client is not None:
            self.client.report_failure(text)
        if self._epoch is not None:
            self._epoch.fail(text)

    def broken(self, text: str) -> None:
        """A thread of this rank has ended unasked: without it the rank cannot go on."""
        self.log("error", text)
        self.fail(text)
        self.stop()

    def stop(self) -> None:
        """Fails what is pending, so that nothing waits for it."""
        text = self.failed or _CLOSED
        self.end_telling()
        self.devices.stop(text, self.rank)
        if self._epoch is not None:
            self._epoch.abort(text, self.rank)
        self.end_profile()

    def close(self) -> None:
        """Leaves the job. Bounded in time; may be called on half of a world."""
        epoch, meeting = self._epoch, self._meeting
        self.end_telling()
        self.end_profile()
        self.group.close()
        self.devices.close()  # first: what the devices still do needs all ranks
        self.lanes.close()
        if not self.failed:
            if epoch is not None:
                epoch.leave()
            if meeting is not None:
                meeting.client.leave()
        if epoch is not None:
            epoch.close()
        if self._whereabouts is not None:
            self._whereabouts.close()
        if self._reception is not None:
            self._reception.close()
        if meeting is not None:
            meeting.close()
        self._epoch = self._reception = self._meeting = None

    def abandon(self) -> None:
        """In a forked child: lets go of the sockets and of nothing else.

        Copies of them here would hide the parent's death from its peers. The threads of
        the core do not exist in the child, so its objects must never be closed.
        """
        _abandoned.append(self)
        if isinstance(self._telling, Teller):
            self._telling.release()
        if self._epoch is not None:
            self._epoch.abandon()
        if self._whereabouts is not None:
            self._whereabouts.release()
        if self._reception is not None:
            self._reception.release()
        if self._meeting is not None:
            self._meeting.release()

    def log(self, level: str, text: str) -> None:
        """One line on standard error, if the level is wanted."""
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.config.log_level):
            stderr.line(f"[{self._prefix}] {level}: {text}")


_abandoned: list[object] = []
