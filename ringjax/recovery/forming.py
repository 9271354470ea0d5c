"""How a rank enlists in an elastic job, and how its members become an epoch.

What the epoch before has left is in elastic_world.py, which puts the new one in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ringjax import _native
from ringjax.config import Config
from ringjax.control.listener import Reception
from ringjax.errors import StartupError
from ringjax.links import calibration
from ringjax.links.mesh import Fabric, Watch
from ringjax.membership.orders import Members
from ringjax.membership.rendezvous_lookup import Meeting
from ringjax.recovery.generation import Wanted
from ringjax.world.coordinates import Standing
from ringjax.world.epoch import Epoch
from ringjax.world.groups import ENDING, REPLICAS
from ringjax.world.introduction import host_names
from ringjax.world.whereabouts import Whereabouts

# Jobs and workers that this process has been and is no more.
_left: set[tuple[str, int]] = set()


def check(config: Config) -> None:
    """Refuses a process that cannot join an elastic job.

    Raises:
        StartupError: the environment does not say enough, or this process has left.
    """
    if not config.rendezvous or config.worker is None:
        raise StartupError(
            "RINGJAX_ELASTIC is set, but RINGJAX_RENDEZVOUS or RINGJAX_WORKER is not: "
            "start elastic jobs by ringrun --min-np"
        )
    if (config.job, config.worker) in _left:
        raise StartupError(
            "this process has left its elastic job by ringjax.shutdown(), and cannot "
            "come back: another process would have to"
        )


def leave(config: Config) -> None:
    """This process must not come back to its job."""
    if config.worker is not None:
        _left.add((config.job, config.worker))


class Former:
    """Forms the epochs of one rank.

    Args:
        meeting: the job and its secret.
        reception: where other ranks call, in all epochs.
        bell: an eventfd for the heartbeats to ring.
        whereabouts: answers what the heartbeats are asked.
        log: takes a level and a sentence.
        recorder: hears of all calls, in all epochs.
    """

    def __init__(
        self,
        config: Config,
        meeting: Meeting,
        reception: Reception,
        bell: int,
        whereabouts: Whereabouts,
        log: Callable[[str, str], None],
        recorder: _native.Recorder,
    ) -> None:
        self._recorder = recorder
        self._config, self._meeting, self._reception = config, meeting, reception
        self._bell, self._log = bell, log
        self._whereabouts = whereabouts

    def form(self, members: Members, watch: Watch, before: Epoch | None) -> Epoch:
        """An epoch without any communicator.

        Args:
            watch: raises when it is not worth while to go on.
            before: the epoch before, if this rank had one.
        """
        standing = Standing.of(members.rank, host_names(members.members))
        fabric = Fabric(
            rank=members.rank,
            members=members.members,
            hosts=standing.hosts,
            epoch=members.epoch,
            job=self._meeting.job,
            secret=self._meeting.secret,
            config=self._patient(members.kind),
            reception=self._reception,
            session=watch,
            shm_bytes=_native.shm_bytes,
            segment_bytes=_native.segment_bytes,
            log=self._log,
        )
        epoch = Epoch(self._config, standing, fabric, self._bell, self._whereabouts)
        epoch.cost = {} if before is None else before.cost
        epoch.recorder = self._recorder
        return epoch

    def connect(
        self,
        epoch: Epoch,
        members: Members,
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
        for number, ranks, name in wanted:
            epoch.link(number, ranks, name)
            if number == REPLICAS:
                small = epoch.link_small(ENDING, everybody, "the ends of calls")
        for number, ranks, name in wanted:
            ending = None
            if number == REPLICAS:  # one membership for all shards of a step
                ending = epoch.open(ENDING, everybody, name, config=small)
            resilient = known.get(number) or self.new_resilient_comm()
            epoch.open(number, ranks, name, resilient, ending=ending)
            if number == 0:
                self._calibrate(epoch, members)

    def new_resilient_comm(self) -> _native.ResilientComm:
        """For a communicator that begins."""
        # The coordinator knows sooner when to give up; this is for when it is lost.
        config = self._config
        return _native.ResilientComm(config.elastic_timeout + config.start_timeout)

    def _patient(self, kind: str) -> Config:
        """Who is there already does not take long, and others may wait for it."""
        config = self._config
        if kind == "start":
            return config
        limit = min(config.start_timeout, 2 * config.failure_timeout + 5)
        return replace(config, start_timeout=limit)

    def _calibrate(self, epoch: Epoch, members: Members) -> None:
        """All ranks need the same constants, and newcomers have none."""
        if self._config.calibrate == "off" or -1 not in members.previous:
            return
        network = calibration.describe(members.members, epoch.standing.hosts)
        if network is not None:
            communicator = epoch.communicators[0]
            epoch.cost, _ = calibration.calibrate(
                communicator, self._config, network, epoch.cost
            )
