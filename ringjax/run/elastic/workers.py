"""The workers of an elastic job: who is a member, what became of whom, how it ends.

A worker's number is never used again; its rank is its place in one epoch. Collects what
the agents and the coordinator say, in whatever order it comes, and makes sentences and
the exit code of it. Pure bookkeeping; sends nothing, waits for nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ringjax.membership.epochs import WITH_GROUP
from ringjax.run.elastic.seats import Seat
from ringjax.run.static_job import Outcome
from ringjax.run.verdict import Blame, blames_others, fate


@dataclass(slots=True, eq=False)
class Worker:
    """One process of the job.

    Attributes:
        rank: in the latest epoch that it belonged to, None: in none.
        joined: when it became a member.
        exit_code, exit_text, ended: how and when its process has ended.
        answered: it has ended without an error, and what the coordinator had decided
            about it before has come.
        settled: it has ended, and so has what it wrote.
        told: when ringrun asked it to leave, as its seat is gone.
        killed: it did not end by itself when it should have.
        fenced, why: when it was declared lost, and why.
        finished: it said that it is through.
        dismissed: it left in good order while the others go on.
        report: what it said before it went down.
        ready: it could be a member.
        certain: its end was seen, it did not only get out of reach with its host.
    """

    number: int
    seat: Seat
    pid: int = 0
    rank: int | None = None
    joined: float = 0.0
    exit_code: int | None = None
    exit_text: str = ""
    ended: float = 0.0
    streams: set[str] = field(default_factory=lambda: {"stdout", "stderr"})
    answered: bool = False
    settled: bool = False
    told: float | None = None
    killed: bool = False
    fenced: float | None = None
    why: str = ""
    finished: bool = False
    dismissed: bool = False
    report: str = ""
    ready: bool = False
    certain: bool = True

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self.exit_code is None

    @property
    def ended_by_us(self) -> bool:
        """Whether ringrun's own signal ended it: that number is no news of the job."""
        return self.killed and self.exit_code == 128 + signal.SIGKILL

    @property
    def ends_with_group(self) -> bool:
        """Whether it was lost because another one of its group was."""
        return self.why.startswith(WITH_GROUP)

    @property
    def loss(self) -> str:
        """Why it was declared lost, to be put behind its name."""
        return f" {'' if self.ends_with_group else 'was declared lost: '}{self.why}"

    @property
    def counts(self) -> bool:
        """Whether it works for the job, or will."""
        return self.runs and self.fenced is None and self.told is None

    @property
    def may_have_heirs(self) -> bool:
        """Whether it was killed or declared lost, and has ended for certain.

        An error of the program would come again, and who is only out of reach may go on
        there: nobody may begin the job afresh beside it.
        """
        by_others = self.fenced is not None or (self.exit_code or 0) > 128
        own_way = self.report or self.finished or self.dismissed
        return not self.runs and self.certain and by_others and not own_way


class Roster:
    """All workers that ever were; `last_words(n)` is what number n wrote last.

    Attributes:
        group: so many are lost and join together, those with one number // group.
    """

    def __init__(
        self, min_np: int, last_words: Callable[[int], str], group: int = 1
    ) -> None:
        self._min_np, self.group = min_np, group
        self._last_words = last_words
        self.workers: dict[int, Worker] = {}  # by number
        self.next = 0  # the least number that was never used
        self.members: dict[int, int] = {}  # of the latest epoch: number -> rank
        self.resets = 0

    def add(self, seat: Seat) -> Worker:
        """A new worker for a seat."""
        seat.worker = self.next
        return self.adopt(self.next, seat)

    def adopt(self, number: int, seat: Seat) -> Worker:
        """A worker that an earlier ringrun has started, in its seat."""
        worker = self.workers.setdefault(number, Worker(number, seat))
        worker.seat = seat
        self.reserve(number + 1)
        return worker

    def known(self, number: int) -> Worker:
        """A worker of which the coordinator speaks, though its host may not be here."""
        if number not in self.workers:
            self.adopt(number, Seat("", number, number, number))
        return self.workers[number]

    def is_lost(self, number: int) -> bool:
        """Of one that is no member any more: it has not left in good order."""
        return not self.workers[number].dismissed

    def reserve(self, number: int) -> None:
        """Workers of all numbers below this one may have been there."""
        self.next = max(self.next, number)

    def mates(self, worker: Worker) -> list[Worker]:
        """The known workers of its group, itself among them."""
        first = worker.number - worker.number % self.group
        numbers = range(first, first + self.group)
        return [self.workers[n] for n in numbers if n in self.workers]

    def running(self) -> list[Worker]:
        """Those whose process is there."""
        return [worker for worker in self.workers.values() if worker.runs]

    def counting(self) -> int:
        """How many work for the job, or will."""
        return sum(worker.counts for worker in self.workers.values())

    def enter(self, members: Mapping[int, int], now: float) -> list[Worker]:
        """An epoch has begun; returns who is new in it, by rank."""
        new = [self.known(n) for n in members if n not in self.members]
        if self.members and self.members.keys() != members.keys():
            self.resets += 1
        self.members = dict(members)
        for number, rank in members.items():
            self.workers[number].rank = rank
        for worker in new:
            worker.joined = now
        return sorted(new, key=lambda worker: members[worker.number])

    def present(self) -> int:
        """Members of the latest epoch that are still there."""
        members = (self.workers[n] for n in self.members)
        return sum(m.runs and m.fenced is None and not m.dismissed for m in members)

    # Sentences.

    def several_hosts(self) -> bool:
        """Whether it has to be said where a worker runs."""
        return len({worker.seat.host for worker in self.workers.values()}) > 1

    def who(self, worker: Worker, *, place: bool) -> str:
        """A worker's name for people; with its host if there are several."""
        where = [f"on {worker.seat.host}"] if place and worker.seat.host else []
        pid = [f"pid {worker.pid}"] if worker.pid else []
        name = f"worker {worker.number}"
        if worker.rank is not None:
            return f"rank {worker.rank} ({', '.join([name, *where, *pid])})"
        return f"{name} ({', '.join([*where, *pid])})" if where or pid else name

    def left_over(self) -> str:
        """How many ranks are left, as the end of a sentence."""
        count, least = self.present(), self._min_np
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        if count >= least:
            return f"; {ranks} {'goes' if count == 1 else 'go'} on"
        left = f"{ranks} {'is' if count == 1 else 'are'} left"
        return f"; {left}, at least {least} {'is' if least == 1 else 'are'} needed"

    def fate(self, worker: Worker) -> str:
        """What became of a worker that has failed, to be put behind its name."""
        if worker.ends_with_group:  # however it ends, that is a consequence
            return worker.loss
        if worker.ended_by_us:
            late = "it did not end by itself, and ringrun killed it"
            if worker.report:
                return fate(1, report=worker.report, how=late)
            return f"{worker.loss if worker.why else ' was asked to leave'} ({late})"
        words = self._last_words(worker.number)
        return fate(
            worker.exit_code or 1,
            text=worker.exit_text,
            report=worker.report,
            last_words=words,
        )

    def own_fault(self, worker: Worker) -> bool:
        """Whether it failed by itself, not because another rank did."""
        if worker.ends_with_group:
            return False
        words = worker.report or worker.exit_text or self._last_words(worker.number)
        by_signal = (worker.exit_code or 0) > 128 and not worker.report
        return by_signal or not blames_others(words)

    # The end.

    def over(self) -> bool:
        """Whether all that matter have ended: the members, or all if there are none."""
        if self.members:
            return all(self.workers[n].settled for n in self.members)
        return all(worker.settled for worker in self.workers.values())

    def heirs(self) -> int:
        """Newcomers that may begin the job afresh once its last member has ended."""
        last = [self.workers[n] for n in self.members]
        if not all(worker.may_have_heirs for worker in last):
            return 0
        others = [w for w in self.workers.values() if w not in last]
        count = sum(worker.counts and worker.ready for worker in others)
        return count if count >= self._min_np else 0

    def succeeded(self) -> list[Worker]:
        """Who has done the job's work to its end, by rank."""
        done = [w for w in self.workers.values() if w.exit_code == 0 and _is_through(w)]
        if self.members:
            done = [worker for worker in done if worker.rank is not None]
        return sorted(done, key=lambda w: (_rank(w), w.number))

    def success(self) -> bool:
        """Whether the job did what it was for."""
        if not self.members:
            return len(self.succeeded()) >= self._min_np
        ended = [self.workers[n] for n in self.members]
        stayed = [worker for worker in ended if not worker.dismissed]
        return bool(stayed) and all(worker.exit_code == 0 for worker in stayed)

    def all_left(self) -> bool:
        """Whether the last members have all left, as they were asked to."""
        ended = [self.workers[n] for n in self.members]
        return bool(ended) and all(worker.dismissed for worker in ended)

    def outcome(self, blobs: Mapping[int, bytes], stop: str, leave: bool) -> Outcome:
        """How the job has ended.

        Args:
            blobs: what workers have returned, by number.
            stop: why it could not go on, if that was so.
            leave: all were asked to leave.
        """
        if self.all_left() or (leave and not self.members):
            why = "every rank has left, as it was asked to"  # or ringrun itself
            return Outcome(128 + signal.SIGTERM, reason=why, left=leave)
        if stop:
            return Outcome(1, reason=stop)
        if self.success():
            done = [worker.number for worker in self.succeeded()]
            results = {rank: blobs.get(n, b"") for rank, n in enumerate(done)}
            return Outcome(0, results=results)
        blame = self.blame(place=self.several_hosts())
        if blame is None:
            return Outcome(1, reason="the ranks ended without having finished")
        results = {blame.rank: blobs.get(blame.worker, b"")}
        return Outcome(blame.exit_code, blame.rank, blame.reason, results)

    def blame(self, *, place: bool) -> Blame | None:
        """The worker that failed first: of the last members, or of all."""
        failed = [worker for worker in self.workers.values() if worker.exit_code]
        last = [worker for worker in failed if worker.number in self.members]
        if any(self.own_fault(worker) for worker in last) or not failed:
            failed = last
        if not failed:
            return None
        order = [(not self.own_fault(w), w.ended, w.number) for w in failed]
        worker = self.workers[min(order)[2]]
        text = self.who(worker, place=place) + self.fate(worker)
        # Not 137, which schedulers take for a lack of memory.
        code = 1 if worker.ended_by_us else worker.exit_code or 1
        return Blame(_rank(worker), code, text, worker.number)


def _rank(worker: Worker) -> int:
    return worker.seat.number if worker.rank is None else worker.rank


def _is_through(worker: Worker) -> bool:
    return not worker.dismissed and worker.told is None
