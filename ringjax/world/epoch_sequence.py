"""The sequence of epochs of one job, as this rank takes part in them.

A static job has one epoch. In an elastic job, each new epoch installs a communicator
into each resilient communicator (see communicator_table.py). recovery.py decides when
the next epoch begins. world.py has the other state of a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from ringjax import _native, stderr
from ringjax.config import LOG_LEVELS, Config
from ringjax.control.listener import LinkListener
from ringjax.control.member import Member
from ringjax.errors import PeerLost, RingjaxError
from ringjax.links.factory import LinkFactory, LossMonitor
from ringjax.membership.client import CallProgress, CoordinatorClient
from ringjax.membership.directives import EpochDirective
from ringjax.membership.joined_job import JoinedJob
from ringjax.world.communicator_ids import EAGER_LANE, REPLICA_SET
from ringjax.world.communicator_table import CommunicatorTable
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_builder import EpochBuilder
from ringjax.world.epoch_info import (
    EpochInfo,
    Transition,
    communicators_of,
    end_reason,
    surviving_transitions,
)
from ringjax.world.groups import Group
from ringjax.world.lanes import Lanes
from ringjax.world.rank_info import RankInfo
from ringjax.world.registry import Registry

CLOSED = "ringjax.shutdown() was called on this rank"


class EpochSequence:
    """The epochs of one job on this rank.

    The recovery thread changes the attributes when a new epoch begins, and the
    program's threads read them. The lock `changed` guards the attributes.
    """

    rank_info: RankInfo
    devices: Devices
    lanes: Lanes
    comm_table: CommunicatorTable

    def __init__(self, config: Config, registry: Registry) -> None:
        self.config, self.elastic = config, config.elastic
        self.failed = ""  # why this rank has failed; "" if it has not
        self.epoch_info: EpochInfo | None = None  # None while this rank is a newcomer
        self.changed = threading.Condition(threading.RLock())
        self.pending_update = 0  # the number of the next change of members, or 0
        self.resizes = 0  # how many pauses have ended
        self.dismissed = False  # whether this rank has left in good order
        # Whether all ranks restart in the current epoch, and the program has not called
        # `accept_restart` yet.
        self.restart_pending = False
        self.contributors: tuple[int, ...] = ()  # see `last_contributors`
        self.sets: dict[int, list[int]] = {}  # the ranks of all process sets, by id
        self.members: Sequence[Member] = ()  # the current members, by rank
        self.group = Group(config.group_size)
        # The indices of this rank's CUDA devices, and why it has none. None until
        # `World.open_devices` is called.
        self.local_devices: tuple[Sequence[int], str] | None = None
        self._registry = registry
        self._joined_job: JoinedJob | None = None
        self._listener: LinkListener | None = None
        self._epoch_builder: EpochBuilder | None = None
        self._epoch: Epoch | None = None
        self._end: tuple[type[RingjaxError], str] | None = None
        self._removed: set[int] = set()
        self._last_ended = -1  # the newest epoch that was stopped
        self._last_joined = -1  # the newest epoch in which the program makes calls
        self._prefix = "ringjax"

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def client(self) -> CoordinatorClient | None:
        """The connection to the coordinator, or None in a job of one process."""
        return None if self._joined_job is None else self._joined_job.client

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """The communicators on which the program's calls run, by id."""
        return self.comm_table.active

    @property
    def epoch(self) -> Epoch:
        """The current epoch. Fails if there is no epoch; see `current_epoch`."""
        assert self._epoch is not None
        return self._epoch

    @property
    def current_epoch(self) -> Epoch | None:
        """The epoch that was installed last. None for a newcomer, and after `close`."""
        return self._epoch

    @property
    def epoch_number(self) -> int:
        """The number of the current epoch, or -1 if there is no epoch."""
        return -1 if self.epoch_info is None else self.epoch_info.epoch

    def log(self, level: str, text: str) -> None:
        """Prints a line on standard error if RINGJAX_LOG_LEVEL enables `level`."""
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.config.log_level):
            stderr.line(f"[{self._prefix}] {level}: {text}")

    def departed_ranks(self) -> dict[int, str]:
        """Returns the ranks that are known to be gone, each with the cause."""
        return {} if self.client is None else self.client.departed_ranks()

    # -- waiting -----------------------------------------------------------------------

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits until `done` returns True. Raises if the job is over for this rank."""
        with self.changed:
            while not done():
                self.check_end()
                self.changed.wait()

    def wait_for_next_epoch(self, before: int) -> None:
        """Waits until a later epoch begins, a restart is pending, or this rank left."""
        self.wait(
            lambda: self.dismissed or self.restart_pending or self.epoch_number > before
        )

    def check_end(self) -> None:
        """Raises an error if the job has ended for this rank."""
        if self._end is not None:
            kind, text = self._end
            raise kind(f"ringjax: {text}")

    def is_over(self, epoch: Epoch, seconds: float = 0.0) -> bool:
        """Returns whether an epoch is over, waiting up to `seconds` for its end."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self._last_ended >= epoch.number or self._epoch is not epoch,
                seconds if self.elastic else 0.0,
            )

    def check_epoch(self, epoch: Epoch) -> None:
        """Raises PeerLost if `epoch` is over."""
        self.check_end()
        if self.is_over(epoch):
            raise PeerLost(f"ringjax: epoch {epoch.number} is over: the ranks change")

    def link_factory_of(self, epoch: Epoch) -> LinkFactory | None:
        """Returns a link factory that connects ranks only while `epoch` is in force."""
        link_factory = epoch.link_factory
        if link_factory is None:
            return None
        return replace(link_factory, loss_monitor=_EpochWatch(self, epoch))

    # -- the end of the job on this rank -----------------------------------------------

    def fail(self, text: str) -> None:
        """Reports to the coordinator and all peers that this rank fails, and why."""
        if self.failed:
            return
        self.failed = text
        if self.client is not None:
            self.client.report_failure(text)
        if self._epoch is not None:
            self._epoch.fail(text)

    def on_thread_failure(self, text: str) -> None:
        """Fails this rank after an error has ended one of ringjax's threads."""
        self.log("error", text)
        self.fail(text)
        self.end(RingjaxError, text)

    def stop(self) -> None:
        """Fails all pending and all later calls of the program."""
        text = self.failed or (self._end[1] if self._end else CLOSED)
        self.devices.stop(text, self.rank)
        if self._epoch is not None:
            self._epoch.abort(text, self.rank)
        self.comm_table.end(dict(self.comm_table.resilient), text)

    def dismiss(self, text: str) -> None:
        """Ends the job for this rank in good order, without an error."""
        self.log("info", f"leaves the job: {text}")
        with self.changed:
            self.dismissed = True
        self.end(RingjaxError, f"this rank has left the job: {text}")

    def end(self, kind: type[RingjaxError], text: str) -> None:
        """Ends the job for this rank: all its calls and waits fail with this error."""
        with self.changed:
            if self._end is None:
                self._end = kind, text
            self.changed.notify_all()
        self.stop()

    # -- the end of an epoch -----------------------------------------------------------

    def halt(self, text: str, rank: int) -> dict[int, CallProgress]:
        """Stops all calls of the current epoch with an error that names `rank`.

        Returns the progress of each communicator, by id; see `Communicator.quiesce`.
        """
        with self.changed:
            epoch = self.epoch
            self._last_ended = epoch.number
            self.changed.notify_all()
            running = dict(epoch.communicators)
        self.devices.stop(text, rank)
        for communicator in running.values():
            communicator.abort(text, rank)
        return {
            number: communicator.quiesce(self.config.failure_timeout)
            for number, communicator in running.items()
            if number in epoch.served
        }

    def epoch_report(self) -> tuple[dict[int, Sequence[int]], int, bool]:
        """Returns process sets, the next free id, and whether all ranks restart."""
        with self.changed:
            if self.epoch_info is None:
                return {}, 0, False
            sets = {n: r for n, r in self.sets.items() if n and n not in self._removed}
            # The results of calls that NCCL had begun are invalid on some ranks or on
            # all ranks. So these calls cannot be repeated, and all ranks must restart.
            lanes = list(self.lanes.lanes.values())
            restart = bool(self.devices.communicators) or any(x.joined for x in lanes)
            return dict(sets), self._registry.next_id, restart

    # -- the beginning of an epoch -----------------------------------------------------

    def link(
        self, directives: Sequence[EpochDirective], watch: LossMonitor | None
    ) -> Epoch:
        """Connects the members of the last directive. Directives are in order of time.

        After a loss, connects the communicators of the world and the replica set only,
        because most parked calls wait for these; `complete` connects the other
        communicators. A newcomer has no parked calls, so it connects all communicators.
        Raises as `LinkFactory.build` does.
        """
        assert self._epoch_builder is not None
        members = directives[-1]
        restart = self.restart_pending or any(m.kind == "restart" for m in directives)
        epoch = self._epoch_builder.build(members, watch, self._epoch)
        wanted = list(communicators_of(members))
        if members.kind == "repair" and not restart and self.epoch_info is not None:
            wanted = [w for w in wanted if w[0] in (0, REPLICA_SET)]
        known = {} if restart else self.comm_table.resilient
        try:
            self._epoch_builder.connect(epoch, members, wanted, known)
        except BaseException:
            # Another member may have connected the whole epoch. Without this message,
            # that member would interpret the closed sockets as the death of this rank.
            epoch.leave()
            epoch.close()
            raise
        return epoch

    def install(self, epoch: Epoch, directives: Sequence[EpochDirective]) -> None:
        """Puts an epoch in force that `link` has connected."""
        members, before = directives[-1], self._epoch
        restart = any(m.kind == "restart" for m in directives)
        with self.changed:
            pending = self.restart_pending or (restart and self.epoch_info is not None)
            self.contributors = self.last_contributors(directives[0])
            sets = {**self.sets, REPLICA_SET: self.group.replicas}
            known = set() if pending else self.comm_table.resilient.keys()
            surviving = surviving_transitions(directives, sets, known)
            reason = end_reason(members)
            ended = self.comm_table.retain(surviving)
            self._set_current(epoch, members)
            # Count the resizes in all directives: if a loss follows a resize before the
            # program wakes up, the pause has ended nevertheless.
            self.resizes += sum(each.kind == "resize" for each in directives)
            self.restart_pending = pending
            if not pending:
                self._last_joined = epoch.number
                self.comm_table.install_all(epoch, surviving)
            self.changed.notify_all()
        self.comm_table.end(ended, reason, drop_lanes=not pending)
        if before is not None:
            before.leave()
            before.close()
        if members.lost and members.rank == 0:
            size = epoch.rank_info.size
            self.log("info", f"going on with {size} ranks: {reason}")

    def complete(self, members: EpochDirective) -> None:
        """Connects the communicators that `link` has omitted. Raises as `link` does."""
        assert self._epoch_builder is not None
        epoch = self.epoch
        rest = [w for w in communicators_of(members) if w[0] not in epoch.served]
        self._epoch_builder.connect(epoch, members, rest, self.comm_table.resilient)
        with self.changed:
            if self.is_over(epoch):
                raise PeerLost(f"epoch {epoch.number} is over")
            for number, ranks, _ in rest:
                unchanged = Transition(ranks=tuple(range(len(ranks))))
                self.comm_table.install(epoch, number, [unchanged])
            self.changed.notify_all()

    def _set_current(self, epoch: Epoch, members: EpochDirective) -> None:
        self._epoch, self.rank_info = epoch, epoch.rank_info
        self.epoch_info = EpochInfo.from_members(members)
        self.members = members.members
        size = self.rank_info.size
        workers = self.epoch_info.workers
        replicas = self.group.update(workers, workers[self.rank])
        self._registry.update(size, members.sets, members.next_set, replicas)
        self.sets = {0: list(range(size)), **{n: [*r] for n, r in members.sets.items()}}
        if epoch.link_factory is not None:
            self._prefix = f"ringjax {self.rank}/{size} e{epoch.number}"
        self.devices.counts = [member.cuda for member in self.members]

    def accept_restart(self) -> None:
        """Makes the program's calls run in an epoch in which all ranks restart."""
        with self.changed:
            if self.restart_pending:
                self.restart_pending = False
                self._last_joined = self.epoch.number
                self.comm_table.install_all(self.epoch, {})

    def install_process_set(
        self, epoch: Epoch, number: int, ranks: Sequence[int]
    ) -> None:
        """Makes calls run on a process set that was connected in `epoch`.

        Raises PeerLost if the epoch has ended.
        """
        with self.changed:
            self.check_epoch(epoch)
            if self.rank in ranks and self._epoch_builder is not None:
                for each in (number, number | EAGER_LANE):
                    resilient = self._epoch_builder.new_resilient_comm()
                    name = f"process set {number}"
                    epoch.open(each, ranks, name, resilient, served=True)
                    self.comm_table.install(epoch, each, [Transition()])
            self.sets[number] = list(ranks)

    def last_contributors(
        self, following: EpochDirective | None = None
    ) -> tuple[int, ...]:
        """Returns the workers whose values are in the last collective of all ranks.

        If the current epoch has ended, `following` is the next epoch's directive, which
        says how many calls of the current epoch count as finished.
        """
        if self._epoch is None or self.epoch_info is None:
            return self.contributors
        collective_ids = 0, EAGER_LANE, REPLICA_SET
        finished = sum(map(self._epoch.completed_calls, collective_ids))
        if following is not None:
            decisions = [following.decisions.get(n, (0, True)) for n in collective_ids]
            finished += sum(calls for calls, _ in decisions)
        return self.epoch_info.workers if finished else self.contributors


class _EpochWatch:
    """Makes `LinkFactory.build` fail when the epoch ends. A `LossMonitor`."""

    def __init__(self, world: EpochSequence, epoch: Epoch) -> None:
        self._world, self._epoch = world, epoch

    def departed_ranks(self) -> dict[int, str]:
        self._world.check_epoch(self._epoch)
        return self._world.departed_ranks()
