"""How one epoch of the job follows another on this rank.

A job that is not elastic has one epoch. In an elastic one each communicator is
resilient: its body in the native core lasts as long as its number does, and an epoch
puts a new communicator into each; when that is: recovery.py. The rest of what a rank
has of its job is in world.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ringjax import _native, stderr
from ringjax.config import LOG_LEVELS, Config
from ringjax.control.listener import LinkListener
from ringjax.control.member import Member
from ringjax.errors import PeerLost, RingjaxError
from ringjax.links.mesh import MeshFactory
from ringjax.membership.client import CallProgress, CoordinatorClient
from ringjax.membership.directives import EpochDirective
from ringjax.membership.joined_job import JoinedJob
from ringjax.world import forming, groups
from ringjax.world.carried_calls import Calls
from ringjax.world.coordinates import Standing
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch
from ringjax.world.generation import Generation, Step, carried, numbers, reason
from ringjax.world.lanes import LANE, Lanes
from ringjax.world.registry import Registry

CLOSED = "ringjax.shutdown() was called on this rank"


class EpochSequence:
    """The epochs of one job, as this rank takes part in them.

    Args:
        registry: the process sets of the program; they follow the epochs.

    Attributes:
        elastic: whether members may be lost and join.
        standing: this rank's coordinates.
        sets: the process sets and their ranks, also those without this rank.
        members: all ranks, as they know each other.
        failed: why this rank fails, once it does.
        group: the processes that JAX joins this one with.
        generation: the membership in force; None: this rank is a newcomer.
        changed: guards what the recovery and the program share; tells of new epochs.
        update: the number of the change that waits, 0: none.
        resizes: how many pauses have come to their end.
        dismissed: this rank has left in good order.
        waits: an epoch is there in which all start again, once the program does.
        calls: what goes on from epoch to epoch.
        device: the numbers of this rank's CUDA devices, or why it has none; None
            until that is known.
    """

    standing: Standing
    devices: Devices
    lanes: Lanes
    calls: Calls

    def __init__(self, config: Config, registry: Registry) -> None:
        self.config, self.elastic = config, config.elastic
        self.failed = ""
        self.generation: Generation | None = None
        self.changed = threading.Condition(threading.RLock())
        self.update = self.resizes = 0
        self.dismissed = self.waits = False
        self.contributors: tuple[int, ...] = ()
        self.sets: dict[int, list[int]] = {}
        self.members: Sequence[Member] = ()
        self.group = groups.Group(config.group_size)
        self.device: tuple[Sequence[int], str] | None = None
        self._registry = registry
        self._meeting: JoinedJob | None = None
        self._listener: LinkListener | None = None
        self._former: forming.Former | None = None
        self._epoch: Epoch | None = None
        self._end: tuple[type[RingjaxError], str] | None = None
        self._removed: set[int] = set()
        self._over = -1  # the newest epoch that was stopped
        self._joined = -1  # the newest one that the program takes part in
        self._prefix = "ringjax"

    @property
    def rank(self) -> int:
        """This rank."""
        return self.standing.rank

    @property
    def client(self) -> CoordinatorClient | None:
        """Speaks with the coordinator; None in a job of one."""
        return None if self._meeting is None else self._meeting.client

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """Those that calls of the program get, by number."""
        return self.calls.serving

    @property
    def epoch(self) -> Epoch:
        """The present one."""
        assert self._epoch is not None
        return self._epoch

    @property
    def present(self) -> Epoch | None:
        """The epoch that is in force, or waits for the program to start again.

        None: there is none, as this rank is a newcomer, or has left.
        """
        return self._epoch

    @property
    def number(self) -> int:
        """The epoch's; -1: none is in force."""
        return -1 if self.generation is None else self.generation.epoch

    def log(self, level: str, text: str) -> None:
        """One line on standard error, if the level is wanted."""
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.config.log_level):
            stderr.line(f"[{self._prefix}] {level}: {text}")

    def departed_ranks(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""
        return {} if self.client is None else self.client.departed_ranks()

    # -- waiting -----------------------------------------------------------------------

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits for something that the recovery does.

        Raises:
            Fenced, RingjaxError: it will never happen.
        """
        with self.changed:
            while not done():
                self.check_end()
                self.changed.wait()

    def wait_for_another(self, before: int) -> None:
        """Waits for another epoch than that one, or for what comes instead."""
        self.wait(lambda: self.dismissed or self.waits or self.number > before)

    def check_end(self) -> None:
        """Raises why this rank cannot go on, if that is so."""
        if self._end is not None:
            kind, text = self._end
            raise kind(f"ringjax: {text}")

    def is_over(self, epoch: Epoch, seconds: float = 0.0) -> bool:
        """Whether an epoch has ended, or will be within so much time."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self._over >= epoch.number or self._epoch is not epoch,
                seconds if self.elastic else 0.0,
            )

    def check_epoch(self, epoch: Epoch) -> None:
        """Raises PeerLost if it is over."""
        self.check_end()
        if self.is_over(epoch):
            raise PeerLost(f"ringjax: epoch {epoch.number} is over: the ranks change")

    def within(self, epoch: Epoch) -> MeshFactory | None:
        """Connects ranks of an epoch that is in force, as long as it is."""
        fabric = epoch.fabric
        return None if fabric is None else replace(fabric, session=_Watch(self, epoch))

    # -- how it ends -------------------------------------------------------------------

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
        self.end(RingjaxError, text)

    def stop(self) -> None:
        """Fails what is pending, and what comes."""
        text = self.failed or (self._end[1] if self._end else CLOSED)
        self.devices.stop(text, self.rank)
        if self._epoch is not None:
            self._epoch.abort(text, self.rank)
        self.calls.end(dict(self.calls.resilient_comms), text)

    def dismiss(self, text: str) -> None:
        """This rank belongs to the job no more, in good order."""
        self.log("info", f"leaves the job: {text}")
        with self.changed:
            self.dismissed = True
        self.end(RingjaxError, f"this rank has left the job: {text}")

    def end(self, kind: type[RingjaxError], text: str) -> None:
        """Nothing follows: everything that waits fails with this."""
        with self.changed:
            if self._end is None:
                self._end = kind, text
            self.changed.notify_all()
        self.stop()

    def halt(self, text: str, rank: int) -> dict[int, CallProgress]:
        """Stops all calls of the present epoch and says how far they came."""
        with self.changed:
            epoch = self.epoch
            self._over = epoch.number
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

    def reported(self) -> tuple[dict[int, Sequence[int]], int, bool]:
        """The process sets, the next number for one, whether only a restart helps."""
        with self.changed:
            if self.generation is None:
                return {}, 0, False
            sets = {n: r for n, r in self.sets.items() if n and n not in self._removed}
            # The calls that NCCL had begun are void, perhaps on some ranks only.
            lanes = list(self.lanes.lanes.values())
            restart = bool(self.devices.communicators) or any(x.joined for x in lanes)
            return dict(sets), self._registry.next_id, restart

    # -- how the next one begins -------------------------------------------------------

    def link(self, heard: Sequence[EpochDirective], watch: Any) -> Epoch:
        """Connects the members of the last of `heard`; raises as `MeshFactory.build`.

        After a loss only the world's and the replica set's, for which most calls wait;
        but a newcomer has no calls, and nothing that they could wait in.

        Args:
            heard: all memberships since the present epoch.
            watch: raises when it is not worth while to go on.
        """
        assert self._former is not None
        members = heard[-1]
        again = self.waits or any(m.kind == "restart" for m in heard)
        epoch = self._former.form(members, watch, self._epoch)
        wanted = list(numbers(members))
        if members.kind == "repair" and not again and self.generation is not None:
            wanted = [w for w in wanted if w[0] in (0, groups.REPLICAS)]
        known = {} if again else self.calls.resilient_comms
        try:
            self._former.connect(epoch, members, wanted, known)
        except BaseException:
            epoch.leave()  # who has formed it already must not take this for a death
            epoch.close()
            raise
        return epoch

    def install(self, epoch: Epoch, heard: Sequence[EpochDirective]) -> None:
        """Puts it in force; `heard` are all memberships since the present one."""
        members, before = heard[-1], self._epoch
        again = any(m.kind == "restart" for m in heard)
        with self.changed:
            waits = self.waits or (again and self.generation is not None)
            self.contributors = self.last_contributors(heard[0])
            sets = {**self.sets, groups.REPLICAS: self.group.replicas}
            known = set() if waits else self.calls.resilient_comms.keys()
            verdicts, why = carried(heard, sets, known), reason(members)
            ended = self.calls.keep(verdicts)
            self._remember(epoch, members)
            # A loss may follow before the program wakes up, which has paused then.
            self.resizes += sum(each.kind == "resize" for each in heard)
            self.waits = waits
            if not waits:
                self._joined = epoch.number
                self.calls.open(epoch, verdicts)
            self.changed.notify_all()
        self.calls.end(ended, why, lanes_too=not waits)
        if before is not None:
            before.leave()
            before.close()
        if self._listener is not None:
            self._listener.discard_before(epoch.number)
        if members.lost and members.rank == 0:
            size = epoch.standing.size
            self.log("info", f"going on with {size} ranks: {why}")

    def complete(self, members: EpochDirective) -> None:
        """Connects what `link` has left; raises as it does."""
        assert self._former is not None
        epoch = self.epoch
        rest = [each for each in numbers(members) if each[0] not in epoch.served]
        self._former.connect(epoch, members, rest, self.calls.resilient_comms)
        with self.changed:
            if self.is_over(epoch):
                raise PeerLost(f"epoch {epoch.number} is over")
            for number, ranks, _ in rest:
                self.calls.put(epoch, number, Step.nothing(len(ranks)))
            self.changed.notify_all()

    def _remember(self, epoch: Epoch, members: EpochDirective) -> None:
        self._epoch, self.standing = epoch, epoch.standing
        self.generation = Generation.of(members)
        self.members = members.members
        size = self.standing.size
        workers = self.generation.workers
        replicas = self.group.renew(workers, workers[self.rank])
        self._registry.renew(size, members.sets, members.next_set, replicas)
        self.sets = {0: list(range(size)), **{n: [*r] for n, r in members.sets.items()}}
        if epoch.fabric is not None:
            self._prefix = f"ringjax {self.rank}/{size} e{epoch.number}"
        self.devices.counts = [int(m.hello.get("cuda", 0)) for m in self.members]

    def acknowledge(self) -> None:
        """The program starts again: its calls belong to the present epoch."""
        with self.changed:
            if self.waits:
                self.waits = False
                self._joined = self.epoch.number
                self.calls.open(self.epoch, {})

    def announce(self, update: int) -> None:
        """A change of the members waits; 0: none."""
        self.update = update

    def adopt(self, epoch: Epoch, number: int, ranks: Sequence[int]) -> None:
        """Takes a process set that was connected in an epoch, if that is in force."""
        with self.changed:
            self.check_epoch(epoch)
            if self.rank in ranks and self._former is not None:
                for each in (number, number | LANE):
                    resilient = self._former.new_resilient_comm()
                    name = f"process set {number}"
                    epoch.open(each, ranks, name, resilient, served=True)
                    self.calls.put(epoch, each, [Step()])
            self.sets[number] = list(ranks)

    def last_contributors(
        self, following: EpochDirective | None = None
    ) -> tuple[int, ...]:
        """Numbers of the processes whose values are in the last call of all ranks.

        Args:
            following: says what became of the calls of this epoch, if it is over.
        """
        if self._epoch is None or self.generation is None:
            return self.contributors
        all_have = 0, LANE, groups.REPLICAS
        finished = sum(map(self._epoch.calls, all_have))
        if following is not None:
            verdicts = [following.verdicts.get(n, (0, True)) for n in all_have]
            finished += sum(calls for calls, _ in verdicts)
        return self.generation.workers if finished else self.contributors


class _Watch:
    """Ends what is being linked when its epoch ends, or a rank of it is gone."""

    def __init__(self, world: EpochSequence, epoch: Epoch) -> None:
        self._world, self._epoch = world, epoch

    def departed_ranks(self) -> dict[int, str]:
        self._world.check_epoch(self._epoch)
        return self._world.departed_ranks()
