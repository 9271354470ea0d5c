"""How one epoch of a job follows another: losses, changes, the end.

The half of the coordinator's rules that acts; what it acts upon is in membership.py,
the other half. Neither has a clock or I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.commit_decision import CommitReport
from ringjax.membership.epoch_state import EpochState
from ringjax.membership.outbox import Outbox

FINISHED = "has finished and left the job"
WITH_GROUP = "ended with its group"  # why a rank is lost begins so


@dataclass(slots=True)
class WorkerInfo:
    """A worker as all others know it; a newcomer is `ready` to be a member, or not."""

    seen: str
    hello: dict[str, Any]
    ready: bool = False


class Epochs:
    """The present epoch, and what makes the next one.

    Args:
        rules: the numbers of the job.

    Attributes:
        phase: "assembly", "run", "revoked", "waiting" or "stopped".
        epoch: the present one.
    """

    def __init__(self, rules: MembershipConfig) -> None:
        self._rules, self._max_np = rules, rules.max_np
        self.phase = "assembly"
        self.epoch = EpochState()
        self._term = 0  # how often a coordinator was started anew
        self._people: dict[int, WorkerInfo] = {}  # the members
        self._newcomers: dict[int, WorkerInfo] = {}  # connected, no members
        self._left: set[int] = set()  # finished members
        self._blank: set[int] = set()  # members that joined after others had finished
        self._outbox = Outbox()
        self._next_kind = "restart"  # after "waiting"
        self._ended: set[int] = set()  # workers that may have heirs
        self._failed: set[int] = set()  # workers that told of an error
        self._number = 0  # how many changes were announced
        self._deadline: float | None = None  # when the phase ends
        self._end = ""  # why it was stopped

    def rank_of(self, worker: int) -> int:
        """The rank of a present member, -1 of anybody else."""
        epoch = self.epoch
        return epoch.order.index(worker) if worker in epoch.alive else -1

    # --- losses ---

    def _lose_member(self, worker: int, why: str, now: float) -> None:
        """If it was a member, it is lost."""
        if worker in self.epoch.alive and self.phase != "stopped":
            self._lose({worker: why}, now)

    def _lose(self, workers: Mapping[int, str], now: float) -> None:
        """Members are lost, for good, and their groups with them."""
        if self._rules.stops:  # the launcher ends the job
            for worker, why in workers.items():
                self._depart(worker, why, now)
            return
        for worker, why in self._with_mates(workers).items():
            self.epoch.remove(worker, why)
            self._people.pop(worker, None)
            self._outbox.fence(worker, why)
            self._outbox.report("fenced", worker, why)
        if self.phase in ("run", "revoked"):
            self._revoke(now)
            self._conclude(now)
        elif self.phase == "waiting":
            self._admit(now)

    def _with_mates(self, workers: Mapping[int, str]) -> dict[int, str]:
        """These members and all others of their groups, and why they are lost."""
        found, epoch = dict(workers), self.epoch
        for worker, why in workers.items():
            rank = epoch.order.index(worker)
            for mate in epoch.alive.intersection(self._rules.mates(worker)):
                text = f"{WITH_GROUP}, which lost rank {rank} ({why})"
                found.setdefault(mate, text)
        return found

    def _end_group(self, worker: int, why: str) -> None:
        """A worker has ended that is no member: no other one of its group can be one.

        JAX cannot take another process into a group, so ringrun starts all of it anew.
        """
        outbox = self._outbox
        for mate in self._rules.mates(worker):
            known = mate in outbox.out or mate in outbox.dismissed or mate in self._left
            if known or mate == worker or mate in self.epoch.alive:
                continue
            text = f"{WITH_GROUP}, which lost worker {worker} ({why})"
            self._newcomers.pop(mate, None)
            outbox.fence(mate, text)
            outbox.report("fenced", mate, text)

    def _revoke(self, now: float, restart: bool = False) -> None:
        """Has all members stop and report."""
        epoch = self.epoch
        epoch.restart |= restart
        if self.phase == "run":
            self.phase = "revoked"
            self._deadline = now + self._rules.failure_timeout
            epoch.pauses.clear()
        self._outbox.tell(epoch.survivors(), epoch.revocation())

    def _conclude(self, now: float) -> None:
        """Forms the next epoch if all that is needed is known."""
        epoch, rules = self.epoch, self._rules
        if self.phase != "revoked" or epoch.unreported():
            return
        torn = epoch.torn(now, rules.doubt)
        if torn is None:
            return
        if torn:
            self._lose(torn, now)  # comes back here
            return
        restart = epoch.restart or any(r.restart for r in epoch.reports.values())
        self._next("restart" if restart else "repair", now)

    def _next(self, kind: str, now: float) -> None:
        """The next epoch, if there are enough for it."""
        alive = len(self.epoch.alive)
        if self._all_done():
            return
        if self._left or alive >= max(self._rules.min_np, 1):
            self._form(kind, self._ready() if kind != "repair" else [])
        else:
            self.phase = "waiting"
            self._deadline = now + self._rules.elastic_timeout
            self._next_kind = "resize" if kind == "resize" else "restart"
            limit = self._rules.elastic_timeout
            text = f"{self._shortage()}: waiting up to {limit:g} s"
            self._outbox.report("waiting", text)
            notice = {"type": "notice", "text": text}
            self._outbox.tell(self.epoch.survivors(), notice)
            self._admit(now)

    def _shortage(self) -> str:
        return f"{len(self.epoch.alive)} of at least {self._rules.min_np} ranks"

    # --- changes that were asked for ---

    def _ready(self) -> list[int]:
        """The newcomers that may become members."""
        if self._left:
            return []
        places = self._max_np - len(self.epoch.alive - self.epoch.leavers)
        ready = self._rules.whole(w for w, p in self._newcomers.items() if p.ready)
        return ready[: max(places - places % self._rules.group, 0)]

    def _admit(self, now: float) -> None:
        """There may be somebody to admit, now or at the next pause."""
        if self.phase == "waiting":
            ready, alive = self._ready(), len(self.epoch.alive)
            # Members that are only out of reach may still train, and must not have
            # others beside them who begin the same job afresh.
            may = alive or self._ended.issuperset(self.epoch.order)
            enough = alive + len(ready) >= self._rules.min_np
            if may and enough and (ready or alive):
                self._form(self._next_kind if alive else "start", ready)
        else:
            self._announce()

    def _announce(self) -> None:
        """Tells the members that somebody wants to join or to leave."""
        epoch = self.epoch
        if self.phase != "run" or self._left:
            return
        change = len(self._ready()), len(epoch.leavers)
        if change in (epoch.announced, (0, 0)):
            return
        epoch.announced = change
        self._number += 1
        message = {"type": "update", "number": self._number}
        message |= {"joining": change[0], "leaving": change[1]}
        self._outbox.tell(epoch.survivors(), message)

    def _resize_if_all_paused(self, now: float) -> None:
        epoch = self.epoch
        if len(epoch.pauses) < len(epoch.alive):
            return
        if self._let_leave():
            return
        ready = self._ready()
        if epoch.alive and len(epoch.alive) + len(ready) >= self._rules.min_np:
            self._form("resize", ready)
        else:
            self._next("resize", now)

    def _let_leave(self) -> bool:
        """Dismisses the members that want to leave; whether nobody is left then."""
        epoch = self.epoch
        for worker in sorted(epoch.leavers):
            epoch.remove(worker, "left the job")
            self._people.pop(worker)
            self._outbox.dismissed.add(worker)
            self._outbox.dismiss(worker, "it leaves, as it was asked to")
        if epoch.alive or self._left:
            return False
        # A user who has all of them leave wants no others in their place.
        self._stop("every rank has left, as it was asked to")
        return True

    def _leave_while_waiting(self) -> None:
        """Of members that were asked to leave at once, one may hear of it first.

        The others then wait for newcomers, at a pause; if they all want to leave as
        well, that has no sense any more.
        """
        epoch, paused = self.epoch, self._next_kind == "resize"
        if self.phase == "waiting" and paused and epoch.leavers >= epoch.alive:
            self._let_leave()

    def _leave(self, worker: int, last: CommitReport | None, now: float) -> None:
        """A member has finished; the others are about to.

        Args:
            last: how far it came in this epoch. None: it had finished before it heard
                of this epoch. Then those who joined with it may have got no state from
                anybody, and are not needed any more.
        """
        if last is None:
            self._blank |= self.epoch.joiners
        self._depart(worker, FINISHED, now, last)
        self._outbox.report("finished", worker)
        if self._rules.stops:
            return  # it does not wait for an answer, and may come again
        self._outbox.send(worker, {"type": "farewell"}, last=True)
        self._left.add(worker)
        if self._all_done():
            return
        if self.phase == "run":
            self._resize_if_all_paused(now)
        elif self.phase == "waiting":
            self._next(self._next_kind, now)
        self._conclude(now)

    def _depart(
        self, worker: int, why: str, now: float, last: CommitReport | None = None
    ) -> None:
        """A member is gone, and the epoch goes on for the others."""
        epoch = self.epoch
        epoch.remove(worker, why, last)
        epoch.untold[epoch.order.index(worker)] = last
        self._people.pop(worker, None)
        self._outbox.report("gone", worker, why)
        self._tell_gone(now)

    def _tell_gone(self, now: float) -> None:
        """Tells the members who is gone, but not more often than every `pause` seconds.

        When a job ends all ranks go at about the same time, and all are to hear of all.
        """
        epoch = self.epoch
        due = epoch.tell_at(self._rules.pause)
        if due is None or now < due:
            return
        ranks = [
            (rank, epoch.lost[rank], None if last is None else last.lines)
            for rank, last in epoch.untold.items()
        ]
        message = {"type": "gone", "epoch": epoch.number, "ranks": ranks}
        self._outbox.tell(epoch.survivors(), message)
        epoch.untold.clear()
        epoch.told = now

    def _all_done(self) -> bool:
        """Whether some have finished and nobody is left who has not."""
        alive = self.epoch.alive
        if not self._left or alive - self._blank:
            return False
        self.phase, self._deadline, self._end = "stopped", None, "the job has finished"
        for worker in (*sorted(alive), *self._newcomers):
            self._outbox.dismiss(worker, "the job has finished without it")
        alive.clear()
        self._newcomers.clear()
        return True

    # --- what follows ---

    def _form(self, kind: str, joiners: Sequence[int]) -> None:
        """Begins the next epoch: those who are alive, then the joiners."""
        old = EpochState(self.epoch.number) if self._rules.stops else self.epoch
        stay = old.survivors()
        kind = kind if stay else "start"
        message = {
            "type": "members",
            "epoch": old.number + 1,
            "term": self._term,
            "kind": kind,
            "group": self._rules.group,
            "previous": [*(old.order.index(w) for w in stay), *(-1 for _ in joiners)],
            "lost": {str(rank): why for rank, why in old.lost.items()},
            **old.outcome(kind),
        }
        for worker in joiners:
            self._people[worker] = self._newcomers.pop(worker)
        new = self.epoch = EpochState(old.number + 1, [*stay, *joiners], joiners)
        new.leavers = old.leavers & new.alive
        self.phase, self._deadline = "run", None
        message["members"] = [
            {"worker": w, "rank": rank, "seen": p.seen, "hello": p.hello}
            for rank, w in enumerate(new.order)
            for p in (self._people[w],)
        ]
        self._outbox.tell(new.order, message)
        for worker in self._newcomers if kind == "start" else ():
            self._welcome(worker)
        self._tell_members(kind)
        self._announce()

    def _welcome(self, worker: int) -> None:
        """Tells a newcomer that it is known; all of its group, once that is here."""
        mates = self._rules.mates(worker)
        if not self._newcomers.keys() >= set(mates):
            return
        known = [self._newcomers[mate] for mate in mates]
        alive, number = len(self.epoch.alive), self.epoch.number
        welcome = {"type": "welcome", "epoch": number, "term": self._term}
        welcome["why"] = f"epoch {number} has {alive} members"
        welcome["size"] = alive + len(mates)
        for place, mate in enumerate(mates):
            rest = {"rank": alive + place, "mates": []}
            if len(mates) > 1:
                rest["mates"] = [{"seen": p.seen, "hello": p.hello} for p in known]
            self._outbox.send(mate, welcome | rest)

    def _tell_members(self, kind: str) -> None:
        ranks = {worker: rank for rank, worker in enumerate(self.epoch.order)}
        self._outbox.report("members", self.epoch.number, kind, ranks)

    def _stop(self, text: str) -> None:
        self.phase, self._deadline, self._end = "stopped", None, text
        self._outbox.report("stop", text)
        for worker in (*self._people, *self._newcomers):
            self._outbox.send(worker, {"type": "stopped", "text": text}, last=True)
