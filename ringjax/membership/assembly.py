"""How a job comes together: for the first time, or again under a new coordinator.

The coordinator keeps nothing on disk. If it was started anew, every member tells the
newest membership that it was sent, and the job goes on as that. Pure bookkeeping; what
follows from it is decided in membership.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ringjax.control.member import ranks_text
from ringjax.membership import commit_decision
from ringjax.membership.commit_decision import CommitReport


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The numbers of a job; those without a word here are explained in `Coordinator`.

    Attributes:
        silence: seconds for an accused member to report; a live one needs milliseconds.
        doubt: seconds from an accusation until accusers and accused that are all alive
            are weighed: what two ends notice can be a heartbeat apart.
        gathering: seconds for the members to come back to a new coordinator.
        moment: seconds for a connection to end whose process has ended.
        pause: seconds between two messages about members that have gone.
        group: so many workers are lost and join together, those with one w // group.
        on_loss: "repair": the job goes on as the next epoch; "stop": the other ranks
            are told who is lost, and the launcher ends the job. Then worker n is rank
            n, and ranks that have left may come together again, as the next epoch.
    """

    np: int
    min_np: int
    max_np: int
    start_timeout: float = 120.0
    elastic_timeout: float = 600.0
    failure_timeout: float = 5.0
    silence: float = 0.5
    doubt: float = 1.0
    gathering: float = 2.0
    moment: float = 0.25
    pause: float = 0.05
    group: int = 1
    on_loss: Literal["repair", "stop"] = "repair"

    @property
    def stops(self) -> bool:
        """Whether the first loss ends the job."""
        return self.on_loss == "stop"

    def mates(self, worker: int) -> range:
        """The workers of its group, by place; itself among them."""
        first = worker - worker % self.group
        return range(first, first + self.group)

    def whole(self, workers: Iterable[int]) -> list[int]:
        """Those whose groups are complete, in order.

        Example:
            >>> MembershipConfig(np=4, min_np=2, max_np=4, group=2).whole([5, 0, 3, 2])
            [2, 3]
        """
        found = set(workers)
        return sorted(w for w in found if found.issuperset(self.mates(w)))


@dataclass(frozen=True, slots=True)
class RejoinState:
    """What a worker knows that has been greeted before.

    Attributes:
        term: how often the coordinator had been started anew, as far as it knows.
        decided: the same, when the newest membership was decided that it was sent.
        epoch: the newest it was sent, -1 for a newcomer.
        members: the message that said so, {} for a newcomer.
        order: the workers of that epoch by rank.
        finished: those who have finished since -> their last report.
    """

    term: int
    decided: int
    epoch: int
    members: Mapping[str, Any]
    order: tuple[int, ...]
    finished: Mapping[int, CommitReport]

    @property
    def age(self) -> tuple[int, int]:
        """Grows with every decision, also over restarts of the coordinator."""
        return self.decided, self.epoch


def read(message: Mapping[str, Any]) -> RejoinState:
    """Takes it from the `rejoin` of a hello.

    Raises:
        ValueError: it is none.
    """
    try:
        members = message.get("members") or {}
        order = tuple(int(m["worker"]) for m in members.get("members", ()))
        finished = {
            order[int(rank)]: commit_decision.read({"lines": lines})
            for rank, lines in (message.get("finished") or {}).items()
        }
        term, epoch = int(message.get("term", 0)), int(message["epoch"])
        decided = int(members.get("term", 0))
        memory = RejoinState(term, decided, epoch, members, order, finished)
    except (TypeError, ValueError, OverflowError, LookupError, AttributeError) as error:
        raise ValueError(f"sent no memory of an epoch: {error!r}") from None
    if memory.epoch >= 0 and not order:
        raise ValueError("sent an epoch without members")
    return memory


@dataclass(frozen=True, slots=True)
class StartJob:
    """The job begins with these workers."""

    workers: list[int]


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """The job goes on as an epoch that its members know.

    Attributes:
        term: greater than that of any coordinator before.
        know: members that were sent it, by rank.
        missed: members that were not.
        others: workers that are not in it, though they were in an older one.
        finished: members that have finished -> their last report.
    """

    memory: RejoinState
    term: int
    know: list[int]
    missed: list[int]
    others: list[int]
    finished: dict[int, CommitReport]


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job does not come together."""

    text: str


class Assembly:
    """Who has come so far.

    Args:
        rules: the numbers of the job.
        resuming: the job had begun under an earlier coordinator; if it is not known
            beforehand, whoever knows an older epoch tells.

    Attributes:
        deadline: when `outcome` may change by itself.
        resuming: it is known that the job had begun.

    Example:
        >>> assembly = Assembly(MembershipConfig(np=3, min_np=2, max_np=3))
        >>> for worker in (4, 2):
        ...     assembly.arrive(worker, None, now=0.0)
        >>> assembly.outcome(now=1.0)
        >>> assembly.outcome(now=120.0)
        StartJob(workers=[2, 4])
    """

    def __init__(self, rules: MembershipConfig, resuming: bool = False) -> None:
        self._rules, self.resuming = rules, resuming
        self.deadline: float | None = None
        self._expected: set[int] = set()  # processes that have not said hello
        self._new: set[int] = set()
        self._known: dict[int, RejoinState] = {}
        self._never: dict[int, str] = {}  # workers that cannot come (back) -> why
        self._patient = False  # the time for all to come back is over

    def expect(self, worker: int) -> None:
        """A process was started as this worker."""
        self._expected.add(worker)

    def arrive(self, worker: int, memory: RejoinState | None, now: float) -> None:
        """A worker has said hello."""
        self._expected.discard(worker)
        self._never.pop(worker, None)
        if memory is None or memory.epoch < 0:
            self._new.add(worker)
        else:
            self._known[worker] = memory
        if memory is not None and not self.resuming:
            self.resuming, self.deadline = True, None
        if self.deadline is None:
            rules = self._rules
            wait = rules.gathering if self.resuming else rules.start_timeout
            self.deadline = now + wait

    def leave(self, worker: int) -> None:
        """It is gone again, if it was here."""
        self._expected.discard(worker)
        self._new.discard(worker)
        self._known.pop(worker, None)
        if not self._new and not self.resuming:
            self.deadline = None  # time runs only while somebody waits

    def never(self, worker: int, why: str) -> None:
        """It will not come any more."""
        self._never[worker] = why
        self.leave(worker)

    def missing(self) -> str:
        """Names the workers that have not come, for a sentence."""
        if self._rules.stops:
            size = self._rules.np
            absent = [rank for rank in range(size) if rank not in self._new]
            return f"{ranks_text(absent)} of {size}"
        return names(self._expected) if self._expected else "more ranks"

    def outcome(self, now: float) -> StartJob | ResumeJob | FailJob | None:
        """What has come of it; None if it is to be waited for."""
        late = self.deadline is not None and now >= self.deadline
        return self._resume(now, late) if self.resuming else self._start(late)

    def _start(self, late: bool) -> StartJob | FailJob | None:
        rules = self._rules
        present = rules.whole(self._new)
        here = len(present)
        if here >= rules.np or (late and here >= rules.min_np):
            return StartJob(present)
        limit = f"within {rules.start_timeout:g} s"
        if rules.stops:
            if self._new and self._never:
                rank, why = min(self._never.items())
                wait = "while others wait for it in ringjax.init()"
                return FailJob(f"rank {rank} {why} {wait}")
            return FailJob(f"{self.missing()} did not join {limit}") if late else None
        absent = f" (not yet here: {names(self._expected)})" if self._expected else ""
        text = f"{here} of at least {rules.min_np} ranks came {limit}{absent}"
        return FailJob(text) if late else None

    def _resume(self, now: float, late: bool) -> ResumeJob | FailJob | None:
        newest = max(self._known.values(), key=lambda known: known.age, default=None)
        order = newest.order if newest else ()
        here = [worker for worker in order if worker in self._known]
        finished: dict[int, CommitReport] = {}
        for memory in self._known.values():
            if newest is not None and memory.age == newest.age:
                finished |= memory.finished
        absent = self._never.keys() | finished.keys()
        missing = len(order) - len(here) - len(absent.intersection(order))
        # With fewer than most the others could be together elsewhere, or come later.
        enough = bool(here) and (not missing or (self._patient and len(here) > missing))
        if late and not enough:
            limit = self._rules.elastic_timeout
            if self._patient:
                return FailJob(
                    f"most members did not come back to the coordinator in {limit:g} s"
                )
            self._patient, self.deadline = True, now + limit
            enough = len(here) > missing
        if newest is None or not enough:
            return None
        know = [w for w in here if self._known[w].age == newest.age]
        missed = [w for w in here if self._known[w].age != newest.age]
        others = sorted(self._known.keys() - set(order))
        term = 1 + max(memory.term for memory in self._known.values())
        return ResumeJob(newest, term, know, missed, others, finished)


def misfit(newcomer: Mapping[str, Any], member: Mapping[str, Any]) -> str:
    """Why a newcomer cannot become a member, from what both said in their hello.

    Example:
        >>> misfit({"version": "1.0"}, {"version": "1.1"})
        "its version is '1.0', that of the members '1.1'"
    """
    if not member:
        return ""
    for name in ("version", "settings"):
        mine, theirs = newcomer.get(name), member.get(name)
        if mine != theirs:
            return f"its {name} is {mine!r}, that of the members {theirs!r}"
    return ""


def names(workers: Iterable[int]) -> str:
    """Workers for a sentence.

    Example:
        >>> names([4, 2])
        'workers 2, 4'
    """
    found = sorted(workers)
    return f"worker{'s' * (len(found) != 1)} {', '.join(map(str, found))}"
