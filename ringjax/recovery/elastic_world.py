"""A world whose ranks come and go: one epoch follows the other in the same process.

Each communicator is resilient: its body in the native core lasts as long as its number
does; an epoch puts a new communicator into each. When that is: thread.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ringjax import _native
from ringjax.config import Config
from ringjax.control import launch_environment
from ringjax.control.member import Member
from ringjax.errors import PeerLost, RingjaxError
from ringjax.membership.client import Line
from ringjax.membership.orders import Members, Welcome
from ringjax.recovery import elastic_devices, elastic_sets, forming
from ringjax.recovery.carried_calls import Calls
from ringjax.recovery.generation import Generation, Step, numbers, reason, steps
from ringjax.recovery.rehearsal import Rehearsal
from ringjax.recovery.thread import Recovery
from ringjax.world import devices, groups
from ringjax.world.coordinates import Standing
from ringjax.world.epoch import Epoch
from ringjax.world.introduction import check_agreement
from ringjax.world.lanes import LANE
from ringjax.world.registry import Registry
from ringjax.world.whereabouts import Whereabouts
from ringjax.world.world import World

_CLOSED = "ringjax.shutdown() was called on this rank"


class ElasticWorld(World):
    """All ranks of an elastic job, as this one is connected with them now.

    Args:
        registry: the process sets of the program; they follow the epochs.

    Raises:
        StartupError, PeerLost: the job could not be brought together.

    Attributes:
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

    elastic = True

    def __init__(self, config: Config, registry: Registry) -> None:
        self.generation: Generation | None = None
        self.changed = threading.Condition(threading.RLock())
        self.update = self.resizes = 0
        self.dismissed = self.waits = False
        self.contributors: tuple[int, ...] = ()
        self.rehearsal = Rehearsal(self)
        self.recovery: Recovery | None = None
        self.privates: dict[tuple[int, ...], int] = {}  # see Program
        self._registry = registry
        self._members: tuple[Member, ...] = ()
        self._former: forming.Former | None = None
        self.device: tuple[Sequence[int], str] | None = None
        self._share: tuple[int, ...] | None = None
        self._end: tuple[type[RingjaxError], str] | None = None
        self._removed: set[int] = set()
        self._over = -1  # the newest epoch that was stopped
        self._joined = -1  # the newest one that the program takes part in
        super().__init__(config)

    def _begin(self, place: launch_environment.Place) -> None:
        self.calls = Calls(self.lanes)
        self.standing = Standing.provisional(place.rank, place.size, self.config)
        forming.check(self.config)
        self._meet(place, self.group.offer(self.config.worker or 0))
        assert self._meeting is not None and self._reception is not None
        client = self._meeting.client
        self.begin_recording(f"worker {self.config.worker}", self._meeting.job)
        self._registry.begin(0)
        self.recovery = Recovery(self, client)
        self._whereabouts = Whereabouts(self.log)
        self._former = forming.Former(
            *(self.config, self._meeting, self._reception, self.recovery.bell),
            *(self._whereabouts, self.log, self.recorder),
        )
        first = client.first
        if isinstance(first, Members):
            check_agreement(first.members)
            self.group.meet(first.mates, first.group)
        if not isinstance(first, Welcome):
            self.recovery.start(first)
            self.wait_for_admission()
            return
        rank, size = first.rank, first.size
        self.standing = Standing.provisional(rank, size, self.config)
        self._prefix = f"ringjax worker {self.config.worker}"
        self.group.meet(first.mates, first.group)
        self.group.replicas = [rank] if self.group.mates else []
        self._registry.renew(size, {}, 0, self.group.replicas)
        self.sets = {0: list(range(size))}
        self.devices = devices.Devices(self, [devices.count(self.config)] * size)
        self.recovery.start(None)

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits for something that the recovery does.

        Raises:
            Fenced, RingjaxError: it will never happen.
        """
        with self.changed:
            while not done():
                self.check_end()
                self.changed.wait()

    def wait_for_admission(self) -> None:
        """Waits until this rank is a member.

        Raises:
            SystemExit: the job ends, in good order, without it.
        """
        self.wait(lambda: self.generation is not None or self.dismissed)
        if self.generation is None:
            raise SystemExit(0)
        self.lanes.open_timeline()
        self.open_profile()

    def wait_for_another(self, before: int) -> None:
        """Waits for another epoch than that one, or for what comes instead."""
        self.wait(lambda: self.dismissed or self.waits or self.number > before)

    @property
    def number(self) -> int:
        """The epoch's; -1: none is in force."""
        return -1 if self.generation is None else self.generation.epoch

    def check_end(self) -> None:
        """Raises why this rank cannot go on, if that is so."""
        if self._end is not None:
            kind, text = self._end
            raise kind(f"ringjax: {text}")

    def broken(self, text: str) -> None:
        """A thread of this rank has ended unasked: without it the rank cannot go on."""
        self.end(RingjaxError, text)
        super().broken(text)

    def stop(self) -> None:
        """Fails what is pending, and what comes."""
        text = self.failed or (self._end[1] if self._end else _CLOSED)
        super().stop()
        self.calls.end(dict(self.calls.resilient_comms), text)

    def close(self) -> None:
        """Leaves the job. Bounded in time; may be called on half of a world."""
        self.end_profile()
        self.rehearsal.end()
        in_order = not (self.failed or self._end or self.dismissed)
        if self.recovery is not None:
            self.recovery.close()
        epoch = self._epoch
        self.devices.close()
        if epoch is not None and in_order:
            epoch.leave()
        if self.client is not None and in_order and epoch is not None:
            lines = {} if self.waits else self._last_lines()
            self.client.leave(lines, self._joined)
        self.stop()
        self.lanes.close()
        self.calls.clear()
        if epoch is not None:
            epoch.close()
        if self._whereabouts is not None:
            self._whereabouts.close()
        if self._reception is not None:
            self._reception.close()
        if self._meeting is not None:
            self._meeting.close()
            self._registry.end()
            forming.leave(self.config)
        self._epoch = self._reception = self._meeting = self.recovery = None

    def _last_lines(self) -> dict[int, Line]:
        try:
            return self.halt(_CLOSED, -1)
        except _native.StatusError as error:  # somebody is still in a call
            self.log("info", f"leaving in the middle of a call: {error}")
            return {}

    def abandon(self) -> None:
        """In a forked child: as in every world."""
        super().abandon()
        if self.recovery is not None:
            self.recovery.release()

    # -- for the recovery --------------------------------------------------------------

    @property
    def present(self) -> Epoch | None:
        """The epoch that is in force, or waits for the program to start again."""
        return None if self.generation is None else self._epoch

    def announce(self, update: int) -> None:
        """A change of the members waits; 0: none."""
        self.update = update

    def dismiss(self, text: str) -> None:
        """This rank belongs to the job no more, in good order."""
        self.log("info", f"leaves the job: {text}")
        with self.changed:
            self.dismissed = True
            if self._end is None:
                self._end = RingjaxError, f"this rank has left the job: {text}"
            self.changed.notify_all()
        self.stop()

    def end(self, kind: type[RingjaxError], text: str) -> None:
        """Nothing follows: everything that waits fails with this."""
        with self.changed:
            if self._end is None:
                self._end = kind, text
            self.changed.notify_all()
        self.stop()

    def halt(self, text: str, rank: int) -> dict[int, Line]:
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
            if number in epoch.resilient_comms
        }

    def reported(self) -> tuple[dict[int, Sequence[int]], int, bool]:
        """The process sets, the next number for one, whether only a restart helps."""
        with self.changed:
            if self.generation is None:
                return {}, 0, False
            sets = {n: r for n, r in self.sets.items() if n and n not in self._removed}
            # What NCCL had in hand is void, perhaps on some ranks only.
            lanes = list(self.lanes.lanes.values())
            restart = bool(self.devices.communicators) or any(x.joined for x in lanes)
            return dict(sets), self._registry.next_id, restart

    def link(self, heard: Sequence[Members], watch: Any) -> Epoch:
        """Connects the members of the last of `heard`; raises as `mesh.Fabric.build`.

        After a loss only the world's and the replica set's, for which most calls wait;
        but a newcomer has no calls, and nothing that they could wait in.
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

    def install(self, epoch: Epoch, heard: Sequence[Members]) -> None:
        """Puts it in force; `heard` are all memberships since the present one."""
        members, before = heard[-1], self._epoch
        wanted = {number for number, _, _ in numbers(members)}
        again = any(m.kind == "restart" for m in heard)
        with self.changed:
            waits = self.waits or (again and self.generation is not None)
            self.contributors = self.last_contributors(heard[0])
            known = set() if waits else wanted & self.calls.resilient_comms.keys()
            sets = {**self.sets, groups.REPLICAS: self.group.replicas}
            verdicts = {number: steps(number, sets, heard) for number in known}
            ended = self.calls.keep(verdicts)
            self._remember(epoch, members)
            # A loss may follow before the program wakes up, which has paused then.
            self.resizes += sum(each.kind == "resize" for each in heard)
            self.waits = waits
            if not waits:
                self._joined = epoch.number
                self.calls.open(epoch, verdicts)
            self.changed.notify_all()
        self.calls.end(ended, reason(members), lanes_too=not waits)
        if before is not None:
            before.leave()
            before.close()
        if self._reception is not None:
            self._reception.retire(epoch.number)
        if members.lost and members.rank == 0:
            size = epoch.standing.size
            self.log("info", f"going on with {size} ranks: {reason(members)}")

    def complete(self, members: Members) -> None:
        """Connects what `link` has left; raises as it does."""
        assert self._former is not None
        epoch = self.epoch
        rest = [
            each for each in numbers(members) if each[0] not in epoch.resilient_comms
        ]
        self._former.connect(epoch, members, rest, self.calls.resilient_comms)
        with self.changed:
            if self.is_over(epoch):
                raise PeerLost(f"epoch {epoch.number} is over")
            for number, ranks, _ in rest:
                self.calls.put(epoch, number, Step.nothing(len(ranks)))
            self.changed.notify_all()

    def _remember(self, epoch: Epoch, members: Members) -> None:
        self._epoch, self.standing = epoch, epoch.standing
        self.generation = Generation.of(members)
        self._members = members.members
        size = self.standing.size
        replicas = self.group.renew(self.generation.workers, self.config.worker or 0)
        self._registry.renew(size, members.sets, members.next_set, replicas)
        self.sets = {0: list(range(size)), **{n: [*r] for n, r in members.sets.items()}}
        self._prefix = f"ringjax {self.rank}/{size} e{epoch.number}"
        self.devices.counts = self._count_devices()

    def acknowledge(self) -> None:
        """The program starts again: its calls belong to the present epoch."""
        with self.changed:
            if self.waits:
                self.waits = False
                self._joined = self.epoch.number
                self.calls.open(self.epoch, {})

    def last_contributors(self, following: Members | None = None) -> tuple[int, ...]:
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

    @property
    def device_share(self) -> tuple[int, ...] | None:
        """As in every world; a rank stays on them, whatever its number becomes."""
        if self._share is None:
            self._share = super().device_share
        return self._share

    def open_devices(self, numbers: Sequence[int], why_not: str = "") -> None:
        """As in every world; a newcomer does it when it is a member."""
        if self.device is not None:
            return
        self.device = numbers, why_not
        if self.generation is not None and not elastic_devices.renew(self):
            elastic_devices.start_again(self, elastic_devices.LOST)

    @property
    def members(self) -> Sequence[Member]:
        """All ranks, as they know each other."""
        return self._members

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """Those that calls of the program get, by number."""
        return self.calls.serving

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives every rank the values of all ranks; `what` names it in errors."""
        assert self.client is not None
        seconds = self.config.start_timeout
        return self.client.exchange(value, seconds, what, self.epoch.number)

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Registers a process set; collective over the world."""
        elastic_sets.add(self, number, ranks, what)
        mine = self.generation is not None and self.rank in self.sets[number]
        # Where another rank had come to the end, the recovery connects it here.
        self.wait(lambda: number in self.calls.serving or not mine)

    def adopt(self, epoch: Epoch, number: int, ranks: Sequence[int]) -> None:
        """Takes a process set that was connected in an epoch, if that is in force."""
        with self.changed:
            self.check_epoch(epoch)
            if self.rank in ranks and self._former is not None:
                for each in (number, number | LANE):
                    resilient = self._former.new_resilient_comm()
                    epoch.open(each, ranks, f"process set {number}", resilient)
                    self.calls.put(epoch, each, [Step()])
            self.sets[number] = list(ranks)

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Ends a process set on this rank.

        What it holds ends with the epoch: here nobody can say whether the other ranks
        have come as far.
        """
        with self.changed:
            self._removed.add(number)
            self.devices.remove(number)

    def is_over(self, epoch: Epoch, seconds: float = 0.0) -> bool:
        """Whether an epoch has ended, or will be within so much time."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self._over >= epoch.number or self._epoch is not epoch, seconds
            )

    def check_epoch(self, epoch: Epoch) -> None:
        """Raises PeerLost if it is over."""
        self.check_end()
        if self.is_over(epoch):
            raise PeerLost(f"ringjax: epoch {epoch.number} is over: the ranks change")

    def prepare(self, what: str) -> None:
        """Has the collectives of a newcomer run alone."""
        if self.generation is None and not self.calls.serving:
            self.rehearsal.begin(what)
