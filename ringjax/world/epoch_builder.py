"""Builds an epoch on this rank: connects the members of a directive.

epoch_sequence.py puts the epoch in force and closes the previous one.
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
from ringjax.world.communicator_ids import CALL_END, REPLICA_SET
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_info import CommunicatorSpec
from ringjax.world.hello import host_keys
from ringjax.world.rank_info import RankInfo
from ringjax.world.stack_probe import StackProbe


class EpochBuilder:
    """Builds the epochs of one rank.

    Args:
        joined_job: the job and its secret; None in a job of one process.
        listener: accepts the connections of other ranks, in all epochs.
        notify: an eventfd that heartbeats write to when a peer is lost; -1 in a static
            job.
        log: called with a level and a text.
    """

    def __init__(
        self,
        config: Config,
        *,
        joined_job: JoinedJob | None,
        listener: LinkListener | None,
        notify: int,
        stack_probe: StackProbe | None,
        log: Callable[[str, str], None],
        recorder: _native.Recorder,
    ) -> None:
        self._config, self._joined_job, self._listener = config, joined_job, listener
        self._notify, self._stack_probe, self._log = notify, stack_probe, log
        self._recorder = recorder

    def build(
        self, members: EpochDirective, watch: LossMonitor | None, before: Epoch | None
    ) -> Epoch:
        """Returns an epoch without communicators.

        Args:
            members: the coordinator's directive.
            watch: raises an error if the epoch is over before it is connected. None in
                a job of one process.
            before: the previous epoch of this rank, if any.
        """
        config = self._config
        # The launcher's local rank is right in the first epoch only, so an elastic job
        # does not use it.
        overrides = None if config.elastic else config
        hosts = host_keys(members.members)
        rank_info = RankInfo.from_hosts(members.rank, hosts, overrides)
        mesh_factory = None
        if self._joined_job is not None and self._listener is not None:
            assert watch is not None
            mesh_factory = MeshFactory(
                rank=members.rank,
                members=members.members,
                hosts=rank_info.hosts,
                epoch=members.epoch,
                job=self._joined_job.job,
                secret=self._joined_job.secret,
                config=self._with_short_timeout(members.kind),
                listener=self._listener,
                loss_monitor=watch,
                shm_bytes=_native.shm_bytes,
                segment_bytes=_native.segment_bytes,
                log=self._log,
            )
        epoch = Epoch(config, rank_info, mesh_factory, self._notify, self._stack_probe)
        epoch.cost = {} if before is None else before.cost
        epoch.recorder = self._recorder
        return epoch

    def connect(
        self,
        epoch: Epoch,
        members: EpochDirective,
        wanted: Sequence[CommunicatorSpec],
        known: Mapping[int, _native.ResilientComm],
    ) -> None:
        """Connects the `wanted` communicators, which serve no calls yet.

        Those of `known`, resilient communicators by id, survive.

        Raises:
            Unreachable, PeerLost, StartupError: some members could not be reached.
        """
        everybody, small = range(len(members.members)), self._config
        elastic = self._config.elastic
        for number, ranks, name in wanted:
            epoch.link(number, ranks, name)
            if number == REPLICA_SET and elastic:
                small = epoch.link_small(CALL_END, everybody, "the ends of calls")
        for number, ranks, name in wanted:
            ending = None
            if number == REPLICA_SET and elastic:  # see CALL_END
                ending = epoch.open(CALL_END, everybody, name, config=small)
            resilient = known.get(number) or self.new_resilient_comm()
            epoch.open(number, ranks, name, resilient, ending=ending, served=True)
            if number == 0:
                self._calibrate(epoch, members)

    def new_resilient_comm(self) -> _native.ResilientComm | None:
        """Returns a new resilient communicator; None in a static job."""
        config = self._config
        if not config.elastic:
            return None
        # The coordinator ends the job after ELASTIC_TIMEOUT. The longer timeout here
        # is for a coordinator that is lost itself.
        return _native.ResilientComm(config.elastic_timeout + config.start_timeout)

    def _with_short_timeout(self, kind: str) -> Config:
        # Only at the start of a job do processes appear late. In later epochs all
        # members run already, and a member that does not connect soon holds up the
        # others.
        config = self._config
        if kind == "start":
            return config
        limit = min(config.start_timeout, 2 * config.failure_timeout + 5)
        return replace(config, start_timeout=limit)

    def _calibrate(self, epoch: Epoch, members: EpochDirective) -> None:
        # All ranks must use equal constants, and newcomers have none: calibrate again
        # only in epochs with newcomers.
        has_newcomers = -1 in members.previous
        if (
            self._config.calibrate == "off"
            or not has_newcomers
            or epoch.mesh_factory is None
        ):
            return
        network = calibration.describe_network(members.members, epoch.rank_info.hosts)
        if network is not None:
            world = epoch.communicators[0]
            epoch.cost, how = calibration.calibrate(
                world, self._config, network, epoch.cost
            )
            costs = ", ".join(
                f"{name} {value:.3g}" for name, value in epoch.cost.items()
            )
            self._log("debug", f"the links, {how}: {costs}")
