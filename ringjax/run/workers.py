"""The table of all workers of a job, and the rules that find the first failure.

Each worker has an id that no later worker gets, and a rank in each epoch in which it is
a member. In a static job worker n is rank n. One failure makes other ranks fail within
milliseconds, and the reports of these failures may arrive in any order. Therefore the
table considers exits, errors that ranks have reported to the coordinator, and the
output of ranks together. This module sends nothing and never waits.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringjax.run.outcome import (
    JobOutcome,
    blames_another_rank,
    describe_failure,
    first_line,
)


@dataclass(slots=True)
class WorkerSlot:
    """A place for one worker on a host.

    Attributes:
        index: local rank of the worker on the host.
        number: rank of the worker until an epoch assigns another rank.
        worker: id of the worker that has the slot.
        free_at: time after which another worker may start in the slot.
        failures: number of consecutive failures soon after a worker has joined.
        failed: whether a worker has ever failed in the slot.
        released: whether a program other than ringrun has asked the last worker to
            leave. That program may need the slot itself.
        removed: whether the host has lost the slot although its worker still runs.
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
    """A process of the job, which this ringrun or an earlier ringrun has started.

    All times are those of `time.monotonic`.

    Attributes:
        rank: rank in the worker's latest epoch, or None if it was never a member.
        join_time: when the worker became a member.
        ended_while_stopping: whether the process ended after ringrun began to end the
            job.
        streams: output streams that are still open.
        coordinator_answered: whether the process ended without an error, and the
            coordinator has replied, so that all its earlier decisions have arrived.
        settled: whether ringrun has handled the end and all output of the process.
        asked_to_leave: when ringrun asked the worker to leave its lost slot.
        killed: whether ringrun sent SIGKILL because the process did not end by itself.
        fenced: when the coordinator declared the worker lost.
        with_group: whether the worker was lost because its group has lost a worker.
        finished: whether the worker has reported the end of its program.
        dismissed: whether the worker left without an error while the job continues.
        report: the error that the worker has reported.
        ready: whether the worker is waiting to become a member.
        cold: whether the worker compiles its step only as a member.
        spare: whether the worker was not needed as a member when it was started or
            became ready.
        end_confirmed: whether the process has ended; False if its host is unreachable.
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
    cold: bool = False
    spare: bool = False
    end_confirmed: bool = True

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def killed_by_ringrun(self) -> bool:
        return self.killed and self.exit_code == 128 + signal.SIGKILL

    @property
    def loss_text(self) -> str:
        """Why the worker was declared lost, in words that follow the worker's name."""
        return f" {'' if self.with_group else 'was declared lost: '}{self.fence_reason}"

    def kind_of_end(self, code: int) -> str:
        """Returns whether the process was "lost", "finished", or "left" as asked to."""
        if self.dismissed or self.asked_to_leave is not None:
            return "left"
        return "lost" if code else "finished"

    @property
    def is_active(self) -> bool:
        """Whether the worker is a member of the job, or may still become one."""
        return self.is_running and self.fenced is None and self.asked_to_leave is None

    @property
    def may_be_succeeded(self) -> bool:
        """Whether new workers may begin the job again after this worker's loss.

        True if the worker was killed or declared lost, and its process has ended. False
        after an error of the program, because it would occur again in new workers.
        False for a worker on an unreachable host, because it may still train, and the
        job must not run twice.
        """
        by_others = self.fenced is not None or (self.exit_code or 0) > 128
        own_way = self.report or self.finished or self.dismissed
        return not self.is_running and self.end_confirmed and by_others and not own_way


class WorkerTable:
    """All workers of a job, including workers that have ended.

    Args:
        least: number of members that the job needs. A static job needs all members.
        last_words: returns the last line of error output of the worker with an id.
        group: number of workers that are lost and join together. Workers with the same
            id // group are in one group.

    Attributes:
        next: the lowest id that no worker has had. members: ranks in the latest epoch,
        by worker id. resets: how often the members have changed.
        stopping: whether ringrun has begun to end the workers.
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
        slot.worker = self.next
        return self.adopt(self.next, slot)

    def adopt(self, number: int, slot: WorkerSlot) -> Worker:
        """Adds a worker that another program or an earlier ringrun has started."""
        rank = None if self._elastic else number
        worker = self.workers.setdefault(number, Worker(number, slot, rank=rank))
        worker.slot = slot
        self.reserve(number + 1)
        return worker

    def get_or_add(self, number: int) -> Worker:
        """Returns a worker. Adds a worker whose host has not joined this ringrun."""
        if number not in self.workers:
            self.adopt(number, WorkerSlot("", number, number, number))
        return self.workers[number]

    def reserve(self, number: int) -> None:
        """Marks all worker ids below `number` as used."""
        self.next = max(self.next, number)

    def group_of(self, worker: Worker) -> list[Worker]:
        """Returns all workers in the group of `worker`, including `worker`."""
        first = worker.number - worker.number % self._group
        numbers = range(first, first + self._group)
        return [self.workers[n] for n in numbers if n in self.workers]

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_running]

    def count_active(self) -> int:
        return sum(worker.is_active for worker in self.workers.values())

    def count_members(self) -> int:
        """Returns how many members of the latest epoch have not ended or left."""
        return sum(
            m.is_running and m.fenced is None and not m.dismissed for m in self._last
        )

    @property
    def _last(self) -> list[Worker]:
        return [self.workers[number] for number in self.members]

    def spares(self) -> list[Worker]:
        """Returns the workers that wait as spares, or are about to."""
        active = (worker for worker in self.workers.values() if worker.is_active)
        return [w for w in active if w.spare and w.rank is None and not w.dismissed]

    # -- events ------------------------------------------------------------------------

    def start_epoch(self, members: Mapping[int, int], now: float) -> list[Worker]:
        """Starts an epoch with these members. Returns new members, by rank."""
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
        """Records an event about one worker; see `Coordinator.events`."""
        worker = self.get_or_add(number)
        match event:
            case "failure" if not worker.report:
                worker.report, worker.report_time = text.strip(), now
            case "ready":
                worker.ready, worker.cold = True, text == "cold"
            case "finished":
                worker.finished = True
            case "dismissed":
                worker.dismissed = True
            case "ended":
                worker.coordinator_answered = True
        return worker

    def record_end(self, worker: Worker, code: int, text: str, now: float) -> None:
        """Records the end of a process. `text` may explain the exit code."""
        worker.exit_code, worker.exit_text, worker.end_time = code, text, now
        worker.ended_while_stopping = self.stopping

    # -- texts -------------------------------------------------------------------------

    def several_hosts(self) -> bool:
        return len({worker.slot.host for worker in self.workers.values()}) > 1

    def describe(self, worker: Worker, *, place: bool) -> str:
        """Returns a worker's rank and id, and its host if `place` is true."""
        host = worker.slot.host if place else ""
        if not self._elastic:
            return f"rank {worker.number}" + (f" ({host})" if host else "")
        where = [f"on {host}"] if host else []
        pid = [f"pid {worker.pid}"] if worker.pid else []
        name = f"worker {worker.number}"
        if worker.rank is not None:
            return f"rank {worker.rank} ({', '.join([name, *where, *pid])})"
        if worker.spare:
            return f"a spare ({', '.join([name, *where, *pid])})"
        return f"{name} ({', '.join([*where, *pid])})" if where or pid else name

    def describe_join(self, worker: Worker, *, place: bool) -> str:
        where = f" on {worker.slot.host}" if place and worker.slot.host else ""
        ranks = _ranks(len(self.members))
        name = f"{'spare ' * worker.spare}worker {worker.number}"
        return f"{name}{where} joined as rank {worker.rank}; {ranks}"

    def describe_remaining(self) -> str:
        """Returns how many ranks are left, as the end of a sentence about a loss."""
        count, least = self.count_members(), self._least
        if count >= least:
            return f"; {_ranks(count)} {'goes' if count == 1 else 'go'} on"
        left = f"{_ranks(count)} {'is' if count == 1 else 'are'} left"
        return f"; {left}, at least {least} {'is' if least == 1 else 'are'} needed"

    def describe_end(self, worker: Worker) -> str:
        """Describes how a worker has failed, in words that follow its name."""
        if worker.with_group:  # the worker did not fail by itself
            return worker.loss_text
        # The worker reported an error, but did not end until ringrun ended the job.
        if worker.ended_while_stopping and worker.report:
            return f" failed: {first_line(worker.report)}"
        if worker.killed_by_ringrun:
            late = "it did not end by itself, and ringrun killed it"
            if worker.report:
                return describe_failure(1, report=worker.report, how=late)
            lost = worker.loss_text if worker.fence_reason else " was asked to leave"
            return f"{lost} ({late})"
        return describe_failure(
            worker.exit_code or 1,
            text=worker.exit_text,
            report=worker.report,
            last_words=self._last_words(worker.number),
        )

    # -- the first failure -------------------------------------------------------------

    def failure_text(self, worker: Worker) -> str:
        return worker.report or worker.exit_text or self._last_words(worker.number)

    def failed_by_itself(self, worker: Worker) -> bool:
        """Returns whether a worker failed by itself, not because of another rank."""
        if worker.with_group:
            return False
        # In an elastic job the last line of output may be about an earlier loss, after
        # which the worker continued. Such a line does not explain why a signal ended
        # the worker.
        known = worker.report or worker.exit_text
        by_signal = self._elastic and (worker.exit_code or 0) > 128 and not known
        return by_signal or not blames_another_rank(self.failure_text(worker))

    def earliest(self, failed: Iterable[Worker]) -> Worker | None:
        """Returns the worker that was the first to report an error or to end.

        Prefers workers that failed by themselves to workers that blame another rank.
        """

        def order(worker: Worker) -> tuple[bool, float, int]:
            when = min(worker.end_time, worker.report_time)
            return not self.failed_by_itself(worker), when, worker.number

        return min(failed, key=order, default=None)

    def failed(self) -> list[Worker]:
        """Returns the workers that have ended with an error.

        Omits workers that ringrun has ended, unless they had reported an error.
        """
        ended = (worker for worker in self.workers.values() if worker.exit_code)
        return [
            worker
            for worker in ended
            if worker.report or not worker.ended_while_stopping
        ]

    def with_report(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.report]

    def hung(self, since: float) -> Worker | None:
        """Returns a worker that reported an error before `since` and still runs.

        A non-daemon thread or an exit handler may keep such a process alive.
        """
        hung = (w for w in self.with_report() if w.is_running and w.report_time < since)
        return next(hung, None)

    def first_failure(self) -> Worker | None:
        """Returns the worker that failed first.

        If a member of the latest epoch failed by itself, considers members only.
        Otherwise considers all workers.
        """
        failed = self.failed()
        last = [worker for worker in failed if worker.number in self.members]
        return self.earliest(last if any(map(self.failed_by_itself, last)) else failed)

    # -- the end of the job ------------------------------------------------------------

    def is_over(self) -> bool:
        """Returns whether all members (without members, all workers) have ended."""
        matter = self._last or self.workers.values()
        return all(worker.settled for worker in matter) and not self.successors()

    def successors(self) -> int:
        """Returns how many newcomers may begin the job again without old members.

        Returns 0 if newcomers must not begin the job again, or if they are too few.
        """
        last = self._last
        if not all(worker.may_be_succeeded for worker in last):
            return 0
        others = [w for w in self.workers.values() if w.number not in self.members]
        count = sum(w.is_active and w.ready and not w.settled for w in others)
        return count if count >= self._least else 0

    def succeeded(self) -> list[Worker]:
        """Returns the workers that have completed the work of the job, by rank."""
        done = (w for w in self.workers.values() if w.exit_code == 0)
        done = (w for w in done if not w.dismissed and w.asked_to_leave is None)
        if self.members:
            done = (worker for worker in done if worker.rank is not None)
        return sorted(done, key=lambda w: (_rank(w), w.number))

    def has_succeeded(self) -> bool:
        """Returns whether the job has completed its work.

        All members that were not dismissed must have ended without an error. If the job
        had no members, enough workers must have ended without an error.
        """
        if not self.members:
            return len(self.succeeded()) >= self._least
        stayed = [worker for worker in self._last if not worker.dismissed]
        return bool(stayed) and all(worker.exit_code == 0 for worker in stayed)

    def outcome(
        self, blobs: Mapping[int, bytes], stop: str = "", leave: bool = False
    ) -> JobOutcome:
        """Returns the outcome of the job, after all workers have ended.

        Args:
            blobs: the pickled results, by worker id. stop: the reason why the job could
            not continue, or "". leave: whether ringrun has asked all workers to leave.
        """
        last = self._last
        if all(worker.dismissed for worker in last) and (last or leave):
            why = "every rank has left, as it was asked to"
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
        # After ringrun's own SIGKILL do not return 137, from which schedulers would
        # conclude that the process was killed for lack of memory.
        ours = worker.ended_while_stopping or worker.killed_by_ringrun
        code = 1 if ours else worker.exit_code or 1
        results = {_rank(worker): blobs.get(worker.number, b"")}
        return JobOutcome(code, _rank(worker), why, results)


class EventSource(Protocol):
    """A `Coordinator` or a `CoordinatorProcess`, of which only the events are used."""

    events: queue.SimpleQueue[tuple[Any, ...]]

    def clear(self) -> None: ...


def take_events(coordinator: EventSource) -> Iterator[tuple[Any, ...]]:
    """Yields the events that have arrived from the coordinator."""
    coordinator.clear()
    with contextlib.suppress(queue.Empty):
        while True:
            yield coordinator.events.get_nowait()


def _rank(worker: Worker) -> int:
    return worker.slot.number if worker.rank is None else worker.rank


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
