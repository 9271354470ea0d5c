"""Builds an epoch on this rank: connects the members that the coordinator lists.

epoch_sequence.py puts the new epoch in force and closes the previous epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringjax import _native
from ringjax.config import Config
from ringjax.control.listener import LinkListener
from ringjax.links import calibration
from ringjax.links.factory import LinkFactory, LossMonitor
from ringjax.links.kept_connections import KeptConnections
from ringjax.membership.directives import EpochDirective
from ringjax.membership.joined_job import JoinedJob
from ringjax.world.communicator_ids import CALL_END, REPLICA_SET
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_info import CommunicatorSpec
from ringjax.world.rank_info import RankInfo
from ringjax.world.stack_probe import StackProbe


@dataclass(frozen=True, kw_only=True)
class EpochBuilder:
    """Builds the epochs of one rank from the coordinator's directives."""

    config: Config
    joined_job: JoinedJob | None  # None in a job of one process
    listener: LinkListener | None  # accepts the links of other ranks, in all epochs
    notify: int  # see `Epoch`
    stack_probe: StackProbe | None
    log: Callable[[str, str], None]  # receives a level and a text
    recorder: _native.Recorder
    kept: KeptConnections = field(default_factory=KeptConnections)
    registered: bool = True  # see `Epoch`

    def build(
        self, members: EpochDirective, watch: LossMonitor | None, before: Epoch | None
    ) -> Epoch:
        """Returns an epoch without communicators. `before` is the previous epoch.

        `watch` raises an error if the new epoch ends before it is connected. `watch` is
        None in a job of one process.
        """
        config = self.config
        # The launcher's local rank is valid in the first epoch only, so an elastic job
        # computes local ranks from the hosts of the members.
        overrides = None if config.elastic else config
        hosts = [member.host for member in members.members]
        rank_info = RankInfo.from_hosts(members.rank, hosts, overrides)
        link_factory = None
        if self.joined_job is not None and self.listener is not None:
            assert watch is not None
            self._keep_connections(members, before)
            link_factory = LinkFactory(
                rank=members.rank,
                members=members.members,
                hosts=rank_info.hosts,
                epoch=members.epoch,
                job=self.joined_job.job,
                secret=self.joined_job.secret,
                config=self._with_short_timeout(members.kind),
                listener=self.listener,
                loss_monitor=watch,
                locate=self.joined_job.client.locate,
                host_bytes=_native.host_bytes,
                log=self.log,
                kept=self.kept,
            )
        return Epoch(
            config=config,
            rank_info=rank_info,
            link_factory=link_factory,
            notify=self.notify,
            stack_probe=self.stack_probe,
            cost={} if before is None else before.cost,
            recorder=self.recorder,
            registered=self.registered,
        )

    def _keep_connections(self, members: EpochDirective, before: Epoch | None) -> None:
        """Takes the control connections of the previous epoch for the next one.

        Before a restart, all ranks connect anew instead: CUDA communicators may still
        use the heartbeat of the previous epoch to agree when they free their memory.
        """
        if members.kind == "restart":
            self.kept.close()
        elif before is not None:
            before.release(self.kept)
        self.kept.announce(members.epoch)
        if self.listener is not None:
            # Callers in earlier epochs must see the end of their connections, which
            # they may otherwise keep.
            self.listener.discard_before(members.epoch)

    def connect(
        self,
        epoch: Epoch,
        members: EpochDirective,
        wanted: Sequence[CommunicatorSpec],
        known: Mapping[int, _native.ResilientComm],
    ) -> None:
        """Connects the `wanted` communicators, on which the program makes no calls yet.

        A communicator whose id is in `known` belongs to the resilient communicator
        there, and any other communicator gets a new one. Raises as `LinkFactory.build`
        does.
        """
        everybody, small = range(len(members.members)), self.config
        elastic = self.config.elastic
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
        """Returns a new resilient communicator, or None in a static job."""
        config = self.config
        if not config.elastic:
            return None
        # The coordinator ends the job after RINGJAX_ELASTIC_TIMEOUT. The timeout here
        # is longer, and only expires if the coordinator is lost, too.
        return _native.ResilientComm(config.elastic_timeout + config.start_timeout)

    def _with_short_timeout(self, kind: str) -> Config:
        # Processes appear late only at the start of a job. In later epochs all members
        # run already, and a member that does not connect soon would delay the other
        # members.
        config = self.config
        if kind == "start":
            return config
        limit = min(config.start_timeout, 2 * config.failure_timeout + 5)
        return replace(config, start_timeout=limit)

    def _calibrate(self, epoch: Epoch, members: EpochDirective) -> None:
        # All ranks must use equal parameters of the cost model, and newcomers have
        # none. So measure the parameters again only in epochs with newcomers.
        has_newcomers = -1 in members.previous
        if (
            self.config.calibrate == "off"
            or not has_newcomers
            or epoch.link_factory is None
        ):
            return
        assert self.joined_job is not None
        hello = self.joined_job.client.hello
        network = calibration.describe_network(members.members, hello)
        if network is not None:
            world = epoch.communicators[0]
            epoch.cost, how = calibration.calibrate(
                world, self.config, network, epoch.cost
            )
            costs = ", ".join(
                f"{name} {value:.3g}" for name, value in epoch.cost.items()
            )
            self.log("debug", f"the links, {how}: {costs}")
