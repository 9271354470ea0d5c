"""Admits workers, removes members, and forms one epoch of a job after another.

These rules of the coordinator decide which workers get a rank, and when: `_admissible`
and `_admit` choose newcomers, `_lose` removes members, and `_form_epoch` assigns ranks.
The subclass in membership.py receives the events of workers and calls these methods. No
method reads a clock or does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringjax.control.member import JsonObject
from ringjax.control.number_lists import compress
from ringjax.control.worker_address import WorkerAddress
from ringjax.membership import member_table
from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.commit_decision import CommitReport
from ringjax.membership.epoch_state import EpochState

OutgoingMessage = tuple[int, JsonObject, bool]  # worker, message, last
LauncherEvent = tuple[Any, ...]  # see `Coordinator.events`
FINISHED = "has finished and left the job"
WITH_GROUP = "ended with its group"  # begins the reason why a group's members end, too


@dataclass(slots=True)
class WorkerInfo:
    """A connected worker with its hello. `ready` means that a newcomer can train."""

    seen: str
    hello: JsonObject
    ready: bool = False
    # The address for workers of this machine and for others, see `WorkerAddress`.
    _near: list[Any] = field(init=False)
    _far: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        hello, port = self.hello, self.hello.get("group_port")
        address = WorkerAddress(
            self.seen,
            str(hello.get("addresses", "")),
            str(hello.get("door", "")),
            near=True,
            group_port=port if isinstance(port, int) else 0,
        )
        self._near = address.to_json()
        self._far = replace(address, door="", near=False).to_json()

    def address_for(self, other: WorkerInfo) -> list[Any]:
        """Returns how another worker can connect to this worker, as JSON."""
        near = self.hello.get("machine") == other.hello.get("machine")
        return self._near if near else self._far


class Outbox:
    """Collects messages for workers and events for the launcher, in order.

    Attributes:
        fenced: workers that were declared lost, with the reasons.
        dismissed: workers that have left without an error.
    """

    def __init__(self) -> None:
        self.fenced: dict[int, str] = {}
        self.dismissed: set[int] = set()
        self._messages: list[OutgoingMessage] = []
        self._events: list[LauncherEvent] = []

    def drain(self) -> tuple[list[OutgoingMessage], list[LauncherEvent]]:
        """Removes and returns all messages and all events."""
        found = self._messages, self._events
        self._messages, self._events = [], []
        return found

    def send(self, worker: int, message: JsonObject, *, last: bool = False) -> None:
        self._messages.append((worker, message, last))

    def send_all(self, workers: Iterable[int], message: JsonObject) -> None:
        self._messages += [(worker, message, False) for worker in workers]

    def publish(self, *event: Any) -> None:
        """Adds an event for the launcher."""
        self._events.append(event)

    def fence(self, worker: int, why: str) -> None:
        """Excludes a worker forever. The process of this worker must not continue."""
        self.fenced[worker] = why
        self.send(worker, {"type": "fenced", "text": why}, last=True)

    def dismiss(self, worker: int, text: str) -> None:
        """Makes a worker leave without an error, because the job does not need it."""
        self.dismissed.add(worker)
        self.publish("dismissed", worker, text)
        self.send(worker, {"type": "dismissed", "text": text}, last=True)


class Epochs:
    """Holds the current epoch and forms the next one.

    Attributes:
        phase: "assembly", "run", "revoked", "waiting" or "stopped", see membership.py.
        epoch: the current epoch.
    """

    def __init__(self, config: MembershipConfig) -> None:
        self._config, self._max_np = config, config.max_np
        self.phase = "assembly"
        self.epoch = EpochState()
        self._term = 0  # restarts of the coordinator so far
        self._members: dict[int, WorkerInfo] = {}
        self._newcomers: dict[int, WorkerInfo] = {}  # connected workers without a rank
        self._finished: set[int] = set()  # members that have finished
        # Members that joined when other members had finished already, so that perhaps
        # no member has sent the training state to them.
        self._stateless: set[int] = set()
        self._outbox = Outbox()
        self._next_kind = "restart"  # the kind of the epoch after "waiting"
        self._replaceable: set[int] = set()  # members that have certainly ended
        self._failed: set[int] = set()  # workers that have reported an error
        self._change_number = 0  # counts the announced changes of the membership
        self._deadline: float | None = None  # the time at which the phase ends
        self._stop_reason = ""

    def rank_of(self, worker: int) -> int:
        """Returns the rank of a worker, or -1 if the worker is no member."""
        epoch = self.epoch
        return epoch.rank_of[worker] if worker in epoch.alive else -1

    # -- losses ------------------------------------------------------------------------

    def _lose_if_member(self, worker: int, why: str, now: float) -> None:
        if worker in self.epoch.alive and self.phase != "stopped":
            self._lose({worker: why}, now)

    def _lose(self, workers: Mapping[int, str], now: float) -> None:
        """Fences lost members and their groups, and ends the epoch."""
        if self._config.stops_on_loss:  # the launcher ends the job
            for worker, why in workers.items():
                self._remove_member(worker, why, now)
            return
        for worker, why in self._with_groups(workers).items():
            self.epoch.remove(worker, why)
            self._members.pop(worker, None)
            self._outbox.fence(worker, why)
            self._outbox.publish("fenced", worker, why)
        if self.phase in ("run", "revoked"):
            self._revoke(now)
            self._conclude(now)
        elif self.phase == "waiting":
            self._admit(now)

    def _with_groups(self, workers: Mapping[int, str]) -> dict[int, str]:
        """Adds to `workers` all other members of their groups, with the reasons."""
        found, epoch = dict(workers), self.epoch
        for worker, why in workers.items():
            rank = epoch.rank_of[worker]
            for mate in epoch.alive.intersection(self._config.group_of(worker)):
                text = f"{WITH_GROUP}, which lost rank {rank} ({why})"
                found.setdefault(mate, text)
        return found

    def _end_group(self, worker: int, why: str) -> None:
        """Fences the group of a worker that has ended and was not a member.

        JAX cannot replace one process of a group of connected processes, so ringrun
        replaces the whole group.
        """
        outbox = self._outbox
        for mate in self._config.group_of(worker):
            gone = {*outbox.fenced, *outbox.dismissed, *self._finished}
            if mate == worker or mate in gone or mate in self.epoch.alive:
                continue
            text = f"{WITH_GROUP}, which lost worker {worker} ({why})"
            self._newcomers.pop(mate, None)
            outbox.fence(mate, text)
            outbox.publish("fenced", mate, text)

    def _revoke(self, now: float, restart: bool = False) -> None:
        """Ends the epoch, so that all members stop their calls and report."""
        epoch = self.epoch
        epoch.restart |= restart
        if self.phase == "run":
            self.phase = "revoked"
            self._deadline = now + self._config.failure_timeout
            epoch.pauses.clear()
        self._outbox.send_all(epoch.survivors(), epoch.revocation())

    def _conclude(self, now: float) -> None:
        """Begins the next epoch if all members have reported and reach each other."""
        epoch, config = self.epoch, self._config
        if self.phase != "revoked" or not epoch.all_reported():
            return
        given_up = epoch.arbitrate(now, config.arbitration_delay)
        if given_up is None:
            return
        if given_up:
            self._lose(given_up, now)  # calls _conclude again
            return
        restart = epoch.restart or any(r.restart for r in epoch.reports.values())
        self._begin_next("restart" if restart else "repair", now)

    def _begin_next(self, kind: str, now: float) -> None:
        """Begins the next epoch, or waits if there are too few members."""
        alive = len(self.epoch.alive)
        if self._stop_if_finished():
            return
        if self._finished or alive >= max(self._config.min_np, 1):
            self._form_epoch(kind, self._admissible() if kind != "repair" else [])
        else:
            self.phase = "waiting"
            self._deadline = now + self._config.elastic_timeout
            self._next_kind = "resize" if kind == "resize" else "restart"
            limit = self._config.elastic_timeout
            text = f"{self._shortage()}: waiting up to {limit:g} s"
            self._outbox.publish("waiting", text)
            notice = {"type": "notice", "text": text}
            self._outbox.send_all(self.epoch.survivors(), notice)
            self._admit(now)

    def _shortage(self) -> str:
        return f"{len(self.epoch.alive)} of at least {self._config.min_np} ranks"

    # -- workers that join or leave ----------------------------------------------------

    def _admissible(self) -> list[int]:
        """Returns the newcomers that may become members now."""
        if self._finished:
            return []
        config = self._config
        free = self._max_np - len(self.epoch.alive - self.epoch.leavers)
        ready = (w for w, info in self._newcomers.items() if info.ready)
        return config.complete_groups(ready)[: max(free - free % config.group, 0)]

    def _admit(self, now: float) -> None:
        """Admits newcomers, immediately or at the next pause of the members."""
        if self.phase == "waiting":
            ready, alive = self._admissible(), len(self.epoch.alive)
            # Prevent split brain: unreachable members may still be training. Newcomers
            # must not begin the job again before all these members have ended.
            safe = alive or self._replaceable.issuperset(self.epoch.order)
            enough = alive + len(ready) >= self._config.min_np
            if safe and enough and (ready or alive):
                self._form_epoch(self._next_kind if alive else "start", ready)
        else:
            self._announce()

    def _announce(self) -> None:
        """Announces to the members that workers want to join or to leave."""
        epoch = self.epoch
        if self.phase != "run" or self._finished:
            return
        change = len(self._admissible()), len(epoch.leavers)
        if change in (epoch.announced, (0, 0)):
            return
        epoch.announced = change
        self._change_number += 1
        message = {"type": "update", "number": self._change_number}
        message |= {"joining": change[0], "leaving": change[1]}
        self._outbox.send_all(epoch.survivors(), message)

    def _resize_if_all_paused(self, now: float) -> None:
        epoch = self.epoch
        if len(epoch.pauses) < len(epoch.alive):
            return
        if self._dismiss_leavers():
            return
        ready = self._admissible()
        if epoch.alive and len(epoch.alive) + len(ready) >= self._config.min_np:
            self._form_epoch("resize", ready)
        else:
            self._begin_next("resize", now)

    def _dismiss_leavers(self) -> bool:
        """Dismisses the members that want to leave; returns whether the job ends."""
        epoch = self.epoch
        for worker in sorted(epoch.leavers):
            epoch.remove(worker, "left the job")
            self._members.pop(worker)
            self._outbox.dismissed.add(worker)
            self._outbox.dismiss(worker, "it leaves, as it was asked to")
        if epoch.alive or self._finished:
            return False
        # End the job: a user who makes all ranks leave does not want newcomers instead.
        self._dismiss_newcomers(list(self._newcomers), "every rank has left")
        self._stop("every rank has left, as it was asked to")
        return True

    def _dismiss_newcomers(self, workers: Iterable[int], why: str) -> None:
        """Dismisses those of the workers that are newcomers."""
        for worker in workers:
            if self._newcomers.pop(worker, None) is not None:
                self._outbox.dismiss(worker, f"it leaves: {why}")

    def _leave_while_waiting(self) -> None:
        """Ends the job if all members that wait for newcomers want to leave.

        If a user makes several members leave at once, the first member may leave before
        the requests of the other members arrive. Without this method, the other members
        would wait for newcomers in vain.
        """
        epoch, paused = self.epoch, self._next_kind == "resize"
        if self.phase == "waiting" and paused and epoch.leavers >= epoch.alive:
            self._dismiss_leavers()

    def _finish_member(
        self, worker: int, last: CommitReport | None, now: float, error: str
    ) -> None:
        """Removes a member that has finished. The other members are about to finish.

        `error` is the error with which `init` has failed on this member, or "".

        `last`, the member's last report, is None if the member finished before it
        received this epoch. Then the workers that joined in this epoch perhaps have not
        received the training state, so the job does not need these workers.
        """
        if last is None:
            self._stateless |= self.epoch.joiners
        why = f"has left the job, because its init failed: {error}"
        self._remove_member(worker, why if error else FINISHED, now, last)
        self._outbox.publish("finished", worker)
        if self._config.stops_on_loss:
            return  # the worker waits for no reply, and may join again
        self._outbox.send(worker, {"type": "farewell"}, last=True)
        self._finished.add(worker)
        if self._stop_if_finished():
            return
        if self.phase == "run":
            self._resize_if_all_paused(now)
        elif self.phase == "waiting":
            self._begin_next(self._next_kind, now)
        self._conclude(now)

    def _remove_member(
        self, worker: int, why: str, now: float, last: CommitReport | None = None
    ) -> None:
        """Removes a member without ending the epoch."""
        epoch = self.epoch
        epoch.remove(worker, why, last)
        epoch.unannounced[epoch.rank_of[worker]] = last
        self._members.pop(worker, None)
        self._outbox.publish("gone", worker, why)
        self._announce_departures(now)

    def _announce_departures(self, now: float) -> None:
        """Announces to the members which ranks have left.

        At the end of a job all ranks leave at about the same time. Without the limit of
        `departure_interval`, the coordinator would send one message per pair of ranks.
        """
        epoch = self.epoch
        due = epoch.announce_at(self._config.departure_interval)
        if due is None or now < due:
            return
        ranks = [
            (rank, epoch.lost[rank], None if last is None else last.lines)
            for rank, last in epoch.unannounced.items()
        ]
        message = {"type": "gone", "epoch": epoch.number, "ranks": ranks}
        self._outbox.send_all(epoch.survivors(), message)
        epoch.unannounced.clear()
        epoch.announced_at = now

    def _stop_if_finished(self) -> bool:
        """Ends the job if only members without training state have not finished."""
        alive = self.epoch.alive
        if not self._finished or alive - self._stateless:
            return False
        self.phase, self._deadline = "stopped", None
        self._stop_reason = "the job has finished"
        for worker in (*sorted(alive), *self._newcomers):
            self._outbox.dismiss(worker, "the job has finished without it")
        alive.clear()
        self._newcomers.clear()
        return True

    # -- beginning an epoch, ending the job --------------------------------------------

    def _form_epoch(self, kind: str, joiners: Sequence[int]) -> None:
        """Begins the next epoch. Members keep their order, and `joiners` follow."""
        old = (
            EpochState(self.epoch.number) if self._config.stops_on_loss else self.epoch
        )
        stay = old.survivors()
        kind = kind if stay else "start"
        message = {
            "type": "members",
            "epoch": old.number + 1,
            "term": self._term,
            "kind": kind,
            "previous": compress(
                [*(old.rank_of[w] for w in stay), *(-1 for _ in joiners)]
            ),
            "lost": {str(rank): why for rank, why in old.lost.items()},
            **old.outcome(kind),
        }
        for worker in joiners:
            self._members[worker] = self._newcomers.pop(worker)
        new = self.epoch = EpochState(old.number + 1, [*stay, *joiners], joiners)
        new.leavers = old.leavers & new.alive
        self.phase, self._deadline = "run", None
        hellos = [self._members[worker].hello for worker in new.order]
        message["members"] = member_table.encode(new.order, hellos)
        self._send_members(message)
        for worker in self._newcomers if kind == "start" else ():
            self._welcome(worker)
        self._publish_members(kind)
        self._announce()

    def _send_members(self, message: JsonObject) -> None:
        """Sends the message that begins an epoch. A group also gets its addresses."""
        order = self.epoch.order
        group = self._group_size()
        if group == 1:
            self._outbox.send_all(order, message)
            return
        mates: dict[int, list[int]] = {}
        for worker in order:
            mates.setdefault(worker // group, []).append(worker)
        for workers in mates.values():
            infos = [self._members[worker] for worker in workers]
            own = {"group": group, "mates": _addresses(infos)}
            self._outbox.send_all(workers, message | own)

    def _group_size(self) -> int:
        """Returns the size of groups. Only the launcher of an elastic job knows it."""
        if not self._config.stops_on_loss or not self.epoch.order:
            return self._config.group
        settings = self._members[self.epoch.order[0]].hello.get("settings")
        size = settings.get("group_size") if isinstance(settings, dict) else 1
        return size if isinstance(size, int) and size > 0 else 1

    def _welcome(self, worker: int) -> None:
        """Welcomes a newcomer and its group as soon as the whole group is connected."""
        mates = self._config.group_of(worker)
        if not self._newcomers.keys() >= set(mates):
            return
        infos = [self._newcomers[mate] for mate in mates]
        alive, number = len(self.epoch.alive), self.epoch.number
        welcome: JsonObject
        welcome = {"type": "welcome", "epoch": number, "term": self._term}
        welcome["why"] = f"epoch {number} has {alive} members"
        welcome["size"] = alive + len(mates)
        welcome["mates"] = _addresses(infos) if len(mates) > 1 else []
        for rank, mate in enumerate(mates, start=alive):
            self._outbox.send(mate, welcome | {"rank": rank})

    def _publish_members(self, kind: str) -> None:
        ranks = dict(self.epoch.rank_of)
        self._outbox.publish("members", self.epoch.number, kind, ranks)

    def _stop(self, text: str) -> None:
        self.phase, self._deadline, self._stop_reason = "stopped", None, text
        self._outbox.publish("stop", text)
        for worker in (*self._members, *self._newcomers):
            self._outbox.send(worker, {"type": "stopped", "text": text}, last=True)


def _addresses(group: Sequence[WorkerInfo]) -> list[list[Any]]:
    """Returns the addresses of the workers of a group, for the workers of the group."""
    first = group[0]
    return [info.address_for(first) for info in group]
