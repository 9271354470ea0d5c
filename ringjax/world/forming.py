"""How the members of a job become an epoch on this rank.

What the epoch before has left is in epoch_sequence.py, which puts the new one in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ringjax import _native
from ringjax.config import Config
from ringjax.control.listener import LinkListener
from ringjax.links import calibration
from ringjax.links.mesh import LossMonitor, MeshFactory
from ringjax.membership.directives import EpochDirective
from ringjax.membership.joined_job import JoinedJob
from ringjax.world.coordinates import Standing
from ringjax.world.epoch import Epoch
from ringjax.world.generation import Wanted
from ringjax.world.groups import ENDING, REPLICAS
from ringjax.world.introduction import host_names
from ringjax.world.whereabouts import Whereabouts


class Former:
    """Forms the epochs of one rank.

    Args:
        meeting: the job and its secret; None: a job of one.
        listener: where other ranks call, in all epochs.
        bell: an eventfd for the heartbeats to ring; -1: the job is not elastic.
        whereabouts: answers what the heartbeats are asked.
        log: takes a level and a sentence.
        recorder: hears of all calls, in all epochs.
    """

    def __init__(
        self,
        config: Config,
        meeting: JoinedJob | None,
        listener: LinkListener | None,
        bell: int,
        whereabouts: Whereabouts | None,
        log: Callable[[str, str], None],
        recorder: _native.Recorder,
    ) -> None:
        self._recorder = recorder
        self._config, self._meeting, self._listener = config, meeting, listener
        self._bell, self._log = bell, log
        self._whereabouts = whereabouts

    def form(
        self, members: EpochDirective, watch: LossMonitor, before: Epoch | None
    ) -> Epoch:
        """An epoch without any communicator.

        Args:
            watch: raises when it is not worth while to go on.
            before: the epoch before, if this rank had one.
        """
        config = self._config
        # The settings know a rank's place on its host in the first epoch at most.
        told = None if config.elastic else config
        standing = Standing.of(members.rank, host_names(members.members), told)
        fabric = None
        if self._meeting is not None and self._listener is not None:
            fabric = MeshFactory(
                rank=members.rank,
                members=members.members,
                hosts=standing.hosts,
                epoch=members.epoch,
                job=self._meeting.job,
                secret=self._meeting.secret,
                config=self._patient(members.kind),
                listener=self._listener,
                session=watch,
                shm_bytes=_native.shm_bytes,
                segment_bytes=_native.segment_bytes,
                log=self._log,
            )
        epoch = Epoch(config, standing, fabric, self._bell, self._whereabouts)
        epoch.cost = {} if before is None else before.cost
        epoch.recorder = self._recorder
        return epoch

    def connect(
        self,
        epoch: Epoch,
        members: EpochDirective,
        wanted: Sequence[Wanted],
        known: Mapping[int, _native.ResilientComm],
    ) -> None:
        """Connects the members, and makes communicators that are not in force yet.

        Args:
            wanted: which.
            known: the resilient communicators that go on, by number.

        Raises:
            Unreachable, PeerLost, StartupError: some could not be reached.
        """
        everybody, small = range(len(members.members)), self._config
        elastic = self._config.elastic
        for number, ranks, name in wanted:
            epoch.link(number, ranks, name)
            if number == REPLICAS and elastic:
                small = epoch.link_small(ENDING, everybody, "the ends of calls")
        for number, ranks, name in wanted:
            ending = None
            if number == REPLICAS and elastic:  # one membership for a step's shards
                ending = epoch.open(ENDING, everybody, name, config=small)
            resilient = known.get(number) or self.new_resilient_comm()
            epoch.open(number, ranks, name, resilient, ending=ending, served=True)
            if number == 0:
                self._calibrate(epoch, members)

    def new_resilient_comm(self) -> _native.ResilientComm | None:
        """For a communicator that begins; None: it has one epoch."""
        config = self._config
        if not config.elastic:
            return None
        # The coordinator knows sooner when to give up; this is for when it is lost.
        return _native.ResilientComm(config.elastic_timeout + config.start_timeout)

    def _patient(self, kind: str) -> Config:
        """Who is there already does not take long, and others may wait for it."""
        config = self._config
        if kind == "start":
            return config
        limit = min(config.start_timeout, 2 * config.failure_timeout + 5)
        return replace(config, start_timeout=limit)

    def _calibrate(self, epoch: Epoch, members: EpochDirective) -> None:
        """All ranks need the same constants, and newcomers have none."""
        old = -1 not in members.previous
        if self._config.calibrate == "off" or old or epoch.fabric is None:
            return
        network = calibration.describe(members.members, epoch.standing.hosts)
        if network is not None:
            world = epoch.communicators[0]
            epoch.cost, how = calibration.calibrate(
                world, self._config, network, epoch.cost
            )
            costs = ", ".join(
                f"{name} {value:.3g}" for name, value in epoch.cost.items()
            )
            self._log("debug", f"the links, {how}: {costs}")
