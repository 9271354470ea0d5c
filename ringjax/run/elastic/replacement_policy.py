"""What is done about workers that end, are declared lost, or are asked to leave.

The coordinator hears of an end at once; people and the slots of the job a moment later,
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

_OUTPUT_DELAY = 0.3  # seconds to wait for what a process wrote before it handle_exit
_REPORT_DELAY = 0.5  # seconds for a worker's own word that it is through to arrive
_FENCE_TIMEOUT = 5.0  # seconds for a worker that was declared lost to end by itself
_LEAVE_TIMEOUT = 30.0  # seconds for a worker that is asked to leave


class ReplacementPolicy:
    """Looks after the workers of one elastic job.

    Args:
        elastic: where and how many.
        table: its workers.
        fleet: reaches them.
        console: shows lines.

    Attributes:
        slots: the slots of the job.
        takeover: ranks that an earlier ringrun has started.
        coordinator: once there is one.
        silent: the job is ending, which says enough.
    """

    def __init__(
        self,
        elastic: ElasticSettings,
        table: WorkerTable,
        agents: AgentPool,
        console: Console,
    ) -> None:
        self._elastic, self._table = elastic, table
        self._agents, self._console = agents, console
        blacklist = Blacklist(elastic.cooldown) if elastic.uses_blacklist else None
        self._blacklist = blacklist
        self.slots = WorkerSlots(
            (),
            first=elastic.np or elastic.max_np,
            most=elastic.max_np,
            least=elastic.min_np,
            blacklist=blacklist,
            group=elastic.group,
        )
        self.takeover = Takeover(
            table, self.slots, agents, console, self._inform_coordinator
        )
        self.coordinator: CoordinatorProcess | None = None
        self.silent = False
        self._due_reports: list[tuple[float, Worker]] = []  # the coordinator hears soon
        self._unannounced: list[Worker] = []  # not yet spoken of
        self._short_since = math.inf

    # Starting.

    def make_coordinator(
        self, secret: bytes, job: str, **given: Any
    ) -> CoordinatorProcess:
        """The job's coordinator, not started yet; `given`: see `Coordinator`."""
        given |= {"note": self._console.note, "resume": self.takeover.resumes}
        self.coordinator = CoordinatorProcess(secret, job, **given)
        for worker in self._table.workers.values():
            self._inform_coordinator(worker)
        self.slots.closed = self.takeover.succeeded
        return self.coordinator

    def add_workers(self, now: float) -> list[Worker]:
        """New workers for the slots that are to be taken now."""
        if self.coordinator is None:
            return []
        slots = self.slots.vacant(self._table.count_active(), now)
        workers = [self._table.add(slot) for slot in slots]
        for worker in workers:
            self._console.add(worker.number, worker.slot.number)
            self._inform_coordinator(worker)
        if workers:
            self._agents.save_job_state(self.takeover.job_state())
        return workers

    def shortage(self, now: float, timeout: float) -> str:
        """Why the job has to be given up: too few workers, and no place for others."""
        count, least = self._table.count_active(), self._elastic.min_np
        if self.slots.closed or count >= least:
            self._short_since = math.inf
            return ""
        self._short_since = min(self._short_since, now)
        # The coordinator, which knows more, has the first word.
        if now - self._short_since <= timeout + 1.0:
            return ""
        few = f"{count} of at least {least} workers are left"
        return f"{few}, and there was no place for others in {timeout:g} s"

    # While they run.

    def is_over(self) -> bool:
        """Whether all that matter have handle_exit."""
        if self._table.members or self.slots.closed:
            return self._table.is_over()
        return self.slots.all_failed()

    def handle_event(self, event: str, worker: Worker, text: str, now: float) -> None:
        """The coordinator has told something of a worker."""
        if event == "fenced":
            self.fence(worker, text, now)
        elif event == "failure":
            # Also one that is no member yet: its slot is wanted if it stays.
            self.fence(worker, f"failed: {text}", now)
        elif event == "finished":
            self.slots.closed = True

    def handle_exit(self, worker: Worker, code: int, text: str, now: float) -> None:
        """Its process has handle_exit."""
        self._table.record_end(worker, code, text, now)
        if text:
            worker.streams.clear()
        if code:
            self._inform_coordinator(worker)
            return
        # It may have said so itself, and the news of it be on its way.
        self._due_reports.append((now + _REPORT_DELAY, worker))
        worker.coordinator_answered = self.coordinator is None
        if self.coordinator is not None:
            self.coordinator.ended(worker.number)

    def _inform_coordinator(self, worker: Worker) -> None:
        """Tells the coordinator that a worker was started, or what became of it."""
        if self.coordinator is None:
            return
        if worker.is_running:
            self.coordinator.expected(worker.number)
            return
        why = self._table.describe_end(worker).lstrip(": ") if worker.exit_code else ""
        why = why or "ended without an error"
        self.coordinator.process_ended(worker.number, why, worker.may_be_succeeded)

    def fence(self, worker: Worker, why: str, now: float) -> None:
        """It was declared lost."""
        worker.fence_reason, worker.with_group = why, why.startswith(WITH_GROUP)
        if not worker.slot.host:  # nobody will tell of its end
            self.handle_exit(worker, 255, why, now)
        if worker.is_running and worker.fenced is None:
            worker.fenced = now
            self._unannounced.append(worker)

    def dismiss(self, number: int, now: float) -> None:
        """Its slot is gone: it is asked to leave, with its group."""
        worker = self._table.workers[number]
        who = self._table.describe(worker, place=True)
        self._console.note(f"{who} is asked to leave: its slot is gone")
        for mate in self._table.group_of(worker):
            if mate.is_running and mate.asked_to_leave is None:
                mate.asked_to_leave = now
                self._agents.signal(signal.SIGTERM, [mate.number], alone=True)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for worker in self._table.workers.values():
            if worker.settled:
                continue
            if worker.exit_code is not None:
                is_over = not worker.streams or now - worker.end_time > _OUTPUT_DELAY
                if is_over and not _is_unexplained(worker):
                    self._settle(worker, now)
            elif not worker.killed and now > _kill_time(worker):
                worker.killed = True
                self._agents.signal(signal.SIGKILL, [worker.number])
        for worker in list(self._unannounced):
            # Of one that has handle_exit meanwhile the better line is said when it settles.
            if worker.is_running and now > (worker.fenced or 0.0) + _OUTPUT_DELAY:
                self._unannounced.remove(worker)
                self._note_end(worker, worker.loss_text)
        while self._due_reports and self._due_reports[0][0] <= now:
            self._inform_coordinator(self._due_reports.pop(0)[1])
        if self.coordinator is not None and not self.silent:
            self.coordinator.tick(now)

    def _settle(self, worker: Worker, now: float) -> None:
        """Nothing more comes from it: whether its slot is taken again."""
        worker.settled = True
        if not worker.streams:
            self._console.remove(worker.number)
        if worker.dismissed or worker.asked_to_leave is not None:
            self.slots.record_leave(
                worker.slot, asked=worker.asked_to_leave is not None
            )
            self._note_end(worker, None if worker.exit_code else " has left")
        elif worker.exit_code == 0 and worker.fenced is None:
            self.slots.closed = True
        else:
            spoken = worker.fenced is not None and worker not in self._unannounced
            self._unannounced = [
                other for other in self._unannounced if other is not worker
            ]
            member_for = (
                None if worker.rank is None else worker.end_time - worker.join_time
            )
            pause = self.slots.record_failure(
                worker.slot,
                member_for=member_for,
                own_fault=self._table.failed_by_itself(worker),
                now=now,
            )
            if not spoken and not self.is_over():  # that would say it, too
                self._note_end(
                    worker, None if worker.exit_code else worker.loss_text, pause
                )
            self._note_blacklisted(worker.slot.host, now)

    def _note_end(self, worker: Worker, what: str | None, pause: float = 0.0) -> None:
        """A line about a worker that is lost or has left; None: what became of it."""
        if self.silent:
            return
        table = self._table
        text = table.describe(worker, place=table.several_hosts())
        text += table.describe_end(worker) if what is None else what
        if worker.rank is not None:
            text += table.describe_remaining()
        elif 0 < pause < math.inf and self._blacklist is None:
            text += f"; the next try is in {pause:g} s"
        self._console.note(text)

    def _note_blacklisted(self, host: str, now: float) -> None:
        seconds = (
            None
            if self._blacklist is None
            else self._blacklist.take_announcement(host, now)
        )
        if seconds is None or self.silent or self.is_over():
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
    known = worker.coordinator_answered or worker.finished or worker.dismissed
    return worker.exit_code == 0 and not known


def _kill_time(worker: Worker) -> float:
    """When it should have handle_exit by itself.

    What has lost its group has nothing to say, and its place is wanted.
    """
    grace = 0.0 if worker.with_group else _FENCE_TIMEOUT
    fenced = math.inf if worker.fenced is None else worker.fenced + grace
    told = (
        math.inf
        if worker.asked_to_leave is None
        else worker.asked_to_leave + _LEAVE_TIMEOUT
    )
    return min(fenced, told)
