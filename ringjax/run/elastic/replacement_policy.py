"""What is done about workers that end, are declared lost, or are asked to leave.

The coordinator hears of an end at once; people and the seats of the job a moment later,
when everything that the process wrote has come, as that says why. Starts nothing.
"""

from __future__ import annotations

import math
import signal
from typing import Any

from ringjax.membership.epochs import WITH_GROUP
from ringjax.run.console import Console
from ringjax.run.elastic.coordinator_process import CoordinatorProcess
from ringjax.run.elastic.elastic_settings import ElasticSettings
from ringjax.run.elastic.takeover import Takeover
from ringjax.run.elastic.worker_slots import WorkerSlots
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.blacklist import Blacklist
from ringjax.run.workers import Worker, WorkerTable

_LAST_WORDS = 0.3  # seconds to wait for what a process wrote before it ended
_NEWS = 0.5  # seconds for a worker's own word that it is through to arrive
_FENCED = 5.0  # seconds for a worker that was declared lost to end by itself
_TOLD = 30.0  # seconds for a worker that is asked to leave


class ReplacementPolicy:
    """Looks after the workers of one elastic job.

    Args:
        elastic: where and how many.
        table: its workers.
        fleet: reaches them.
        console: shows lines.

    Attributes:
        seating: the seats of the job.
        adoption: ranks that an earlier ringrun has started.
        coordinator: once there is one.
        silent: the job is ending, which says enough.
    """

    def __init__(
        self,
        elastic: ElasticSettings,
        table: WorkerTable,
        fleet: AgentPool,
        console: Console,
    ) -> None:
        self._elastic, self._table = elastic, table
        self._fleet, self._console = fleet, console
        blacklist = Blacklist(elastic.cooldown) if elastic.blacklists else None
        self._blacklist = blacklist
        self.seating = WorkerSlots(
            (),
            first=elastic.np or elastic.max_np,
            most=elastic.max_np,
            least=elastic.min_np,
            blacklist=blacklist,
            group=elastic.group,
        )
        self.adoption = Takeover(table, self.seating, fleet, console, self._tell)
        self.coordinator: CoordinatorProcess | None = None
        self.silent = False
        self._gone: list[tuple[float, Worker]] = []  # the coordinator hears soon
        self._fenced: list[Worker] = []  # not yet spoken of
        self._short_since = math.inf

    # Starting.

    def coordinate(self, secret: bytes, job: str, **given: Any) -> CoordinatorProcess:
        """The job's coordinator, not started yet; `given`: see `Coordinator`."""
        given |= {"note": self._console.note, "resume": self.adoption.resumes}
        self.coordinator = CoordinatorProcess(secret, job, **given)
        for worker in self._table.workers.values():
            self._tell(worker)
        self.seating.closed = self.adoption.done
        return self.coordinator

    def vacancies(self, now: float) -> list[Worker]:
        """New workers for the seats that are to be taken now."""
        if self.coordinator is None:
            return []
        seats = self.seating.vacant(self._table.counting(), now)
        workers = [self._table.add(seat) for seat in seats]
        for worker in workers:
            self._console.add(worker.number, worker.seat.number)
            self._tell(worker)
        if workers:
            self._fleet.remember(self.adoption.memory())
        return workers

    def shortage(self, now: float, timeout: float) -> str:
        """Why the job has to be given up: too few workers, and no place for others."""
        count, least = self._table.counting(), self._elastic.min_np
        if self.seating.closed or count >= least:
            self._short_since = math.inf
            return ""
        self._short_since = min(self._short_since, now)
        # The coordinator, which knows more, has the first word.
        if now - self._short_since <= timeout + 1.0:
            return ""
        few = f"{count} of at least {least} workers are left"
        return f"{few}, and there was no place for others in {timeout:g} s"

    # While they run.

    def over(self) -> bool:
        """Whether all that matter have ended."""
        if self._table.members or self.seating.closed:
            return self._table.over()
        return self.seating.all_failed()

    def heard(self, event: str, worker: Worker, text: str, now: float) -> None:
        """The coordinator has told something of a worker."""
        if event == "fenced":
            self.fence(worker, text, now)
        elif event == "failure":
            # Also one that is no member yet: its seat is wanted if it stays.
            self.fence(worker, f"failed: {text}", now)
        elif event == "finished":
            self.seating.closed = True

    def ended(self, worker: Worker, code: int, text: str, now: float) -> None:
        """Its process has ended."""
        self._table.ended(worker, code, text, now)
        if text:
            worker.streams.clear()
        if code:
            self._tell(worker)
            return
        # It may have said so itself, and the news of it be on its way.
        self._gone.append((now + _NEWS, worker))
        worker.answered = self.coordinator is None
        if self.coordinator is not None:
            self.coordinator.ended(worker.number)

    def _tell(self, worker: Worker) -> None:
        """Tells the coordinator that a worker was started, or what became of it."""
        if self.coordinator is None:
            return
        if worker.runs:
            self.coordinator.expected(worker.number)
            return
        why = self._table.fate(worker).lstrip(": ") if worker.exit_code else ""
        why = why or "ended without an error"
        self.coordinator.process_ended(worker.number, why, worker.may_have_heirs)

    def fence(self, worker: Worker, why: str, now: float) -> None:
        """It was declared lost."""
        worker.why, worker.with_group = why, why.startswith(WITH_GROUP)
        if not worker.seat.host:  # nobody will tell of its end
            self.ended(worker, 255, why, now)
        if worker.runs and worker.fenced is None:
            worker.fenced = now
            self._fenced.append(worker)

    def dismiss(self, number: int, now: float) -> None:
        """Its seat is gone: it is asked to leave, with its group."""
        worker = self._table.workers[number]
        who = self._table.who(worker, place=True)
        self._console.note(f"{who} is asked to leave: its slot is gone")
        for mate in self._table.mates(worker):
            if mate.runs and mate.told is None:
                mate.told = now
                self._fleet.signal(signal.SIGTERM, [mate.number], alone=True)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for worker in self._table.workers.values():
            if worker.settled:
                continue
            if worker.exit_code is not None:
                over = not worker.streams or now - worker.ended > _LAST_WORDS
                if over and not _is_unexplained(worker):
                    self._settle(worker, now)
            elif not worker.killed and now > _latest(worker):
                worker.killed = True
                self._fleet.signal(signal.SIGKILL, [worker.number])
        for worker in list(self._fenced):
            # Of one that has ended meanwhile the better line is said when it settles.
            if worker.runs and now > (worker.fenced or 0.0) + _LAST_WORDS:
                self._fenced.remove(worker)
                self._say(worker, worker.loss)
        while self._gone and self._gone[0][0] <= now:
            self._tell(self._gone.pop(0)[1])
        if self.coordinator is not None and not self.silent:
            self.coordinator.tick(now)

    def _settle(self, worker: Worker, now: float) -> None:
        """Nothing more comes from it: whether its seat is taken again."""
        worker.settled = True
        if not worker.streams:
            self._console.remove(worker.number)
        if worker.dismissed or worker.told is not None:
            self.seating.left(worker.seat, asked=worker.told is not None)
            self._say(worker, None if worker.exit_code else " has left")
        elif worker.exit_code == 0 and worker.fenced is None:
            self.seating.closed = True
        else:
            spoken = worker.fenced is not None and worker not in self._fenced
            self._fenced = [other for other in self._fenced if other is not worker]
            member_for = None if worker.rank is None else worker.ended - worker.joined
            pause = self.seating.failed(
                worker.seat,
                member_for=member_for,
                own_fault=self._table.own_fault(worker),
                now=now,
            )
            if not spoken and not self.over():  # that would say it, too
                self._say(worker, None if worker.exit_code else worker.loss, pause)
            self._speak_of_host(worker.seat.host, now)

    def _say(self, worker: Worker, what: str | None, pause: float = 0.0) -> None:
        """A line about a worker that is lost or has left; None: what became of it."""
        if self.silent:
            return
        table = self._table
        text = table.who(worker, place=table.several_hosts())
        text += table.fate(worker) if what is None else what
        if worker.rank is not None:
            text += table.left_over()
        elif 0 < pause < math.inf and self._blacklist is None:
            text += f"; the next try is in {pause:g} s"
        self._console.note(text)

    def _speak_of_host(self, host: str, now: float) -> None:
        seconds = None if self._blacklist is None else self._blacklist.news(host, now)
        if seconds is None or self.silent or self.over():
            return
        how_long = "any more" if seconds == math.inf else f"for {seconds:.0f} s"
        self._console.note(
            f"host {host} gets no worker {how_long}: one has failed there"
        )


def _is_unexplained(worker: Worker) -> bool:
    """Whether it has ended without an error, and the reason is still to come.

    A worker that was sent away makes room for another one; any other has come to the
    end of its program, and so has the job.
    """
    known = worker.answered or worker.finished or worker.dismissed
    return worker.exit_code == 0 and not known


def _latest(worker: Worker) -> float:
    """When it should have ended by itself.

    What has lost its group has nothing to say, and its place is wanted.
    """
    grace = 0.0 if worker.with_group else _FENCED
    fenced = math.inf if worker.fenced is None else worker.fenced + grace
    told = math.inf if worker.told is None else worker.told + _TOLD
    return min(fenced, told)
