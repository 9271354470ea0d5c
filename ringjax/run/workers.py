"""The workers of a job: which are members, what became of them, and whom to blame.

A worker's number is never used again; its rank is its place in one epoch. In a static
job worker n is rank n. One failure brings down other ranks within milliseconds, and the
news may overtake each other, so exits, reports to the coordinator and what the ranks
wrote are weighed together. Pure bookkeeping; sends nothing, waits for nothing.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringjax.run.shutdown import (
    JobOutcome,
    blames_another_rank,
    describe_failure,
    first_line,
)


@dataclass(slots=True)
class WorkerSlot:
    """A place for one worker.

    Attributes:
        host, index: where; the index is the worker's local rank.
        number: its rank as long as no epoch has given it one.
        worker: who sits there.
        free_at: when the slot may be taken again.
        failures: in a row, each soon after the worker started.
        released: its worker was asked to leave by somebody else, who may want the
            place for something else.
        removed: its host is; it is there as long as its worker is.
    """

    host: str
    index: int
    number: int
    worker: int | None = None
    free_at: float = -math.inf
    failures: int = 0
    failed: bool = False
    released: bool = False
    removed: bool = False


@dataclass(slots=True, eq=False)
class Worker:
    """One process of the job.

    Attributes:
        rank: in the latest epoch that it belonged to, None: in none.
        joined: when it became a member.
        exit_code, exit_text, ended: how and when its process has ended.
        ours: it has ended after ringrun had begun to end the job.
        answered: it has ended without an error, and what the coordinator had decided
            about it before has come.
        settled: it has ended, and so has what it wrote.
        told: when ringrun asked it to leave, as its slot is gone.
        killed: it did not end by itself when it should have.
        fenced, why: when it was declared lost, and why.
        with_group: it was lost because another worker of its group was.
        finished: it said that it is through.
        dismissed: it left in good order while the others go on.
        report, reported: what it said before it went down, and when.
        ready: it could be a member.
        certain: its end was seen, it did not only get out of reach with its host.
    """

    number: int
    slot: WorkerSlot
    pid: int = 0
    rank: int | None = None
    join_time: float = 0.0
    exit_code: int | None = None
    exit_text: str = ""
    end_time: float = math.inf
    ended_while_stopping: bool = False
    streams: set[str] = field(default_factory=lambda: {"stdout", "stderr"})
    coordinator_answered: bool = False
    settled: bool = False
    asked_to_leave: float | None = None
    killed: bool = False
    fenced: float | None = None
    fence_reason: str = ""
    with_group: bool = False
    finished: bool = False
    dismissed: bool = False
    report: str = ""
    report_time: float = math.inf
    ready: bool = False
    end_confirmed: bool = True

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.exit_code is None

    @property
    def killed_by_ringrun(self) -> bool:
        """Whether ringrun's own signal ended it: that number is no news of the job."""
        return self.killed and self.exit_code == 128 + signal.SIGKILL

    @property
    def loss_text(self) -> str:
        """Why it was declared lost, to be put behind its name."""
        return f" {'' if self.with_group else 'was declared lost: '}{self.fence_reason}"

    @property
    def is_active(self) -> bool:
        """Whether it works for the job, or will."""
        return self.is_running and self.fenced is None and self.asked_to_leave is None

    @property
    def may_be_succeeded(self) -> bool:
        """Whether it was killed or declared lost, and has ended for certain.

        An error of the program would come again, and a worker that is only out of reach
        may go on there: nobody may begin the job afresh beside it.
        """
        by_others = self.fenced is not None or (self.exit_code or 0) > 128
        own_way = self.report or self.finished or self.dismissed
        return not self.is_running and self.end_confirmed and by_others and not own_way


class WorkerTable:
    """All workers that ever were.

    Args:
        least: so many are needed; in a static job all.
        last_words: what the worker of a number wrote last.
        group: so many are lost and join together, those with one number // group.
        elastic: the job goes on after a loss.

    Attributes:
        workers: by number.
        next: the least number that was never used.
        members: of the latest epoch, number -> rank.
        resets: how often the members have changed.
        stopping: from now on workers end because ringrun makes them.
    """

    def __init__(
        self,
        least: int,
        last_words: Callable[[int], str],
        group: int = 1,
        *,
        elastic: bool,
    ) -> None:
        self._least, self._last_words, self._group = least, last_words, group
        self._elastic = elastic
        self.workers: dict[int, Worker] = {}
        self.next = 0
        self.members: dict[int, int] = {}
        self.resets = 0
        self.stopping = False

    def add(self, slot: WorkerSlot) -> Worker:
        """A new worker for a slot."""
        slot.worker = self.next
        return self.adopt(self.next, slot)

    def adopt(self, number: int, slot: WorkerSlot) -> Worker:
        """A worker that somebody else has started, in its slot."""
        rank = None if self._elastic else number
        worker = self.workers.setdefault(number, Worker(number, slot, rank=rank))
        worker.slot = slot
        self.reserve(number + 1)
        return worker

    def get_or_add(self, number: int) -> Worker:
        """A worker of which the coordinator speaks, though its host may not be here."""
        if number not in self.workers:
            self.adopt(number, WorkerSlot("", number, number, number))
        return self.workers[number]

    def reserve(self, number: int) -> None:
        """Workers of all numbers below this one may have been there."""
        self.next = max(self.next, number)

    def group_of(self, worker: Worker) -> list[Worker]:
        """The known workers of its group, itself among them."""
        first = worker.number - worker.number % self._group
        numbers = range(first, first + self._group)
        return [self.workers[n] for n in numbers if n in self.workers]

    def running(self) -> list[Worker]:
        """Those whose process is there."""
        return [worker for worker in self.workers.values() if worker.is_running]

    def count_active(self) -> int:
        """How many work for the job, or will."""
        return sum(worker.is_active for worker in self.workers.values())

    def count_members(self) -> int:
        """Members of the latest epoch that are still there."""
        return sum(
            m.is_running and m.fenced is None and not m.dismissed for m in self._last
        )

    @property
    def _last(self) -> list[Worker]:
        return [self.workers[number] for number in self.members]

    # What happens.

    def start_epoch(self, members: Mapping[int, int], now: float) -> list[Worker]:
        """An epoch has begun; returns who is new in it, by rank."""
        new = [self.get_or_add(n) for n in members if n not in self.members]
        if self.members and self.members.keys() != members.keys():
            self.resets += 1
        self.members = dict(members)
        for number, rank in members.items():
            self.workers[number].rank = rank
        for worker in new:
            worker.join_time = now
        return sorted(new, key=lambda worker: members[worker.number])

    def record_event(self, event: str, number: int, text: str, now: float) -> Worker:
        """The coordinator tells something of one worker, see `Coordinator.events`."""
        worker = self.get_or_add(number)
        match event:
            case "failure" if not worker.report:
                worker.report, worker.report_time = text.strip(), now
            case "ready":
                worker.ready = True
            case "finished":
                worker.finished = True
            case "dismissed":
                worker.dismissed = True
            case "ended":
                worker.coordinator_answered = True
        return worker

    def record_end(self, worker: Worker, code: int, text: str, now: float) -> None:
        """Its process has ended with an exit code; `text` if there is more to say."""
        worker.exit_code, worker.exit_text, worker.end_time = code, text, now
        worker.ended_while_stopping = self.stopping

    # Sentences.

    def several_hosts(self) -> bool:
        """Whether it has to be said where a worker runs."""
        return len({worker.slot.host for worker in self.workers.values()}) > 1

    def describe(self, worker: Worker, *, place: bool) -> str:
        """A worker's name for people; with its host if there are several."""
        host = worker.slot.host if place else ""
        if not self._elastic:
            return f"rank {worker.number}" + (f" ({host})" if host else "")
        where = [f"on {host}"] if host else []
        pid = [f"pid {worker.pid}"] if worker.pid else []
        name = f"worker {worker.number}"
        if worker.rank is not None:
            return f"rank {worker.rank} ({', '.join([name, *where, *pid])})"
        return f"{name} ({', '.join([*where, *pid])})" if where or pid else name

    def describe_join(self, worker: Worker, *, place: bool) -> str:
        """That it is a member now."""
        where = f" on {worker.slot.host}" if place and worker.slot.host else ""
        ranks = _ranks(len(self.members))
        return f"worker {worker.number}{where} joined as rank {worker.rank}; {ranks}"

    def describe_remaining(self) -> str:
        """How many ranks are left, as the end of a sentence."""
        count, least = self.count_members(), self._least
        if count >= least:
            return f"; {_ranks(count)} {'goes' if count == 1 else 'go'} on"
        left = f"{_ranks(count)} {'is' if count == 1 else 'are'} left"
        return f"; {left}, at least {least} {'is' if least == 1 else 'are'} needed"

    def describe_end(self, worker: Worker) -> str:
        """What became of a worker that has failed, to be put behind its name."""
        if worker.with_group:  # however it ends, that is a consequence
            return worker.loss_text
        if (
            worker.ended_while_stopping and worker.report
        ):  # it hung until ringrun ended the job
            return f" failed: {first_line(worker.report)}"
        if worker.killed_by_ringrun:
            late = "it did not end by itself, and ringrun killed it"
            if worker.report:
                return describe_failure(1, report=worker.report, how=late)
            return f"{worker.loss_text if worker.fence_reason else ' was asked to leave'} ({late})"
        return describe_failure(
            worker.exit_code or 1,
            text=worker.exit_text,
            report=worker.report,
            last_words=self._last_words(worker.number),
        )

    # Whom to blame.

    def failure_text(self, worker: Worker) -> str:
        """Why it has failed, as well as that is known."""
        return worker.report or worker.exit_text or self._last_words(worker.number)

    def failed_by_itself(self, worker: Worker) -> bool:
        """Whether it failed by itself, not because another rank did."""
        if worker.with_group:
            return False
        # Its last words may be about an earlier loss, after which it went on.
        known = worker.report or worker.exit_text
        by_signal = self._elastic and (worker.exit_code or 0) > 128 and not known
        return by_signal or not blames_another_rank(self.failure_text(worker))

    def earliest(self, failed: Iterable[Worker]) -> Worker | None:
        """Which of these to blame. A report counts from when it came."""

        def order(worker: Worker) -> tuple[bool, float, int]:
            when = min(worker.end_time, worker.report_time)
            return not self.failed_by_itself(worker), when, worker.number

        return min(failed, key=order, default=None)

    def failed(self) -> list[Worker]:
        """Those that have ended with an error; what ringrun ends has not failed."""
        ended = (worker for worker in self.workers.values() if worker.exit_code)
        return [
            worker
            for worker in ended
            if worker.report or not worker.ended_while_stopping
        ]

    def with_report(self) -> list[Worker]:
        """Those that have said that they fail."""
        return [worker for worker in self.workers.values() if worker.report]

    def hung(self, since: float) -> Worker | None:
        """A worker that has said before that time that it fails, and has not ended.

        A thread that is no daemon, or an exit handler, keeps its process.
        """
        hung = (w for w in self.with_report() if w.is_running and w.report_time < since)
        return next(hung, None)

    def first_failure(self) -> Worker | None:
        """The worker that failed first: of the last members, or of all."""
        failed = self.failed()
        last = [worker for worker in failed if worker.number in self.members]
        return self.earliest(last if any(map(self.failed_by_itself, last)) else failed)

    # The end.

    def is_over(self) -> bool:
        """Whether all that matter have ended: the members, or all if there are none."""
        matter = self._last or self.workers.values()
        return all(worker.settled for worker in matter) and not self.successors()

    def successors(self) -> int:
        """Newcomers that may begin the job afresh once its last member has ended."""
        last = self._last
        if not all(worker.may_be_succeeded for worker in last):
            return 0
        others = [w for w in self.workers.values() if w.number not in self.members]
        count = sum(w.is_active and w.ready and not w.settled for w in others)
        return count if count >= self._least else 0

    def succeeded(self) -> list[Worker]:
        """Who has done the job's work to its end, by rank."""
        done = (w for w in self.workers.values() if w.exit_code == 0)
        done = (w for w in done if not w.dismissed and w.asked_to_leave is None)
        if self.members:
            done = (worker for worker in done if worker.rank is not None)
        return sorted(done, key=lambda w: (_rank(w), w.number))

    def has_succeeded(self) -> bool:
        """Whether the job did what it was for."""
        if not self.members:
            return len(self.succeeded()) >= self._least
        stayed = [worker for worker in self._last if not worker.dismissed]
        return bool(stayed) and all(worker.exit_code == 0 for worker in stayed)

    def outcome(
        self, blobs: Mapping[int, bytes], stop: str = "", leave: bool = False
    ) -> JobOutcome:
        """How the job has ended.

        Args:
            blobs: what workers have returned, by number.
            stop: why it could not go on, if that was so.
            leave: all were asked to leave.
        """
        last = self._last
        if all(worker.dismissed for worker in last) and (last or leave):
            why = "every rank has left, as it was asked to"  # or ringrun itself
            return JobOutcome(128 + signal.SIGTERM, reason=why, left=leave)
        if stop:
            return JobOutcome(1, reason=stop)
        if self.has_succeeded():
            done = [worker.number for worker in self.succeeded()]
            results = {rank: blobs.get(n, b"") for rank, n in enumerate(done)}
            return JobOutcome(0, results=results)
        worker = self.first_failure()
        if worker is None:
            return JobOutcome(1, reason="the ranks ended without having finished")
        why = self.describe(worker, place=self.several_hosts()) + self.describe_end(
            worker
        )
        # Not 137, which schedulers take for a lack of memory.
        ours = worker.ended_while_stopping or worker.killed_by_ringrun
        code = 1 if ours else worker.exit_code or 1
        results = {_rank(worker): blobs.get(worker.number, b"")}
        return JobOutcome(code, _rank(worker), why, results)


def take_events(coordinator: Any) -> Iterator[tuple[Any, ...]]:
    """What a coordinator, or its process, has decided: see `Coordinator.events`."""
    coordinator.clear()
    with contextlib.suppress(queue.Empty):
        while True:
            yield coordinator.events.get_nowait()


def _rank(worker: Worker) -> int:
    return worker.slot.number if worker.rank is None else worker.rank


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
