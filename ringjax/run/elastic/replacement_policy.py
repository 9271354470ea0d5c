"""Replacement policy: handles workers of an elastic job that have ended or are lost.

The policy reports the end of a worker to the coordinator immediately. When all output
of the worker's process has arrived, the policy prints a line about the end, which the
output explains, and releases the worker's slot.
"""

from __future__ import annotations

import math
import signal

from ringjax.membership.epochs import WITH_GROUP
from ringjax.run.console import Console
from ringjax.run.elastic.coordinator_process import CoordinatorProcess
from ringjax.run.elastic.elastic_settings import ElasticSettings
from ringjax.run.elastic.spares import Spares
from ringjax.run.elastic.takeover import Takeover
from ringjax.run.elastic.worker_slots import Blacklist, WorkerSlots
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.workers import Worker, WorkerTable

_OUTPUT_DELAY = 0.3  # seconds to wait for the output of a process that has ended
# Seconds between the end of a process and the report of this end. In this time the
# worker's last message, that its program has finished, reaches the coordinator.
_REPORT_DELAY = 0.5
_FENCE_TIMEOUT = 5.0  # seconds until a worker that was declared lost is killed
_LEAVE_TIMEOUT = 30.0  # seconds until a worker that was asked to leave is killed


class ReplacementPolicy:
    """Decides which workers of one elastic job to start, kill or ask to leave.

    Attributes:
        takeover: registers workers that an earlier ringrun has started. coordinator:
        None before `use_coordinator` is called. silent: whether the job is ending, so
        that the policy prints nothing about losses.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        table: WorkerTable,
        agents: AgentPool,
        console: Console,
    ) -> None:
        self.settings, self._table = settings, table
        self._agents, self._console = agents, console
        blacklist = Blacklist(settings.cooldown) if settings.uses_blacklist else None
        self._blacklist = blacklist
        self.slots = WorkerSlots(
            (),
            first=settings.np or settings.max_np,
            most=settings.max_np + settings.spares,
            least=settings.min_np,
            blacklist=blacklist,
            group=settings.group,
        )
        self.spares = Spares(settings, table, self.slots, console.note)
        self.takeover = Takeover(
            table, self.slots, agents, console, self._inform_coordinator
        )
        self.coordinator: CoordinatorProcess | None = None
        self.silent = False
        # (time, worker): the workers whose end must be reported at that time.
        self._due_reports: list[tuple[float, Worker]] = []
        # Fenced workers about which the policy has printed no line yet.
        self._unannounced: list[Worker] = []
        self._short_since = math.inf

    # -- the start ---------------------------------------------------------------------

    def use_coordinator(self, coordinator: CoordinatorProcess) -> None:
        """Reports the workers of an earlier ringrun to the coordinator of this job."""
        self.coordinator = coordinator
        for worker in self._table.workers.values():
            self._inform_coordinator(worker)
        self.slots.closed = self.takeover.succeeded

    def add_workers(self, now: float) -> list[Worker]:
        """Adds a worker for each slot that must have one now. Returns the workers."""
        if self.coordinator is None or self.spares.wait_for_joins(now):
            return []
        slots = self.slots.vacant(self._table.count_active(), now)
        workers = [self._table.add(slot) for slot in slots]
        for worker in workers:
            self._console.add(worker.number, worker.slot.number)
            self._inform_coordinator(worker)
        self.spares.mark_new(workers)
        if workers:
            self._agents.save_job_state(self.takeover.job_state())
        return workers

    def shortage(self, now: float, timeout: float) -> str:
        """Returns why the job must end if too few workers were left for `timeout` s.

        Returns "" if the job continues.
        """
        count, least = self._table.count_active(), self.settings.min_np
        if self.slots.closed or count >= least:
            self._short_since = math.inf
            return ""
        self._short_since = min(self._short_since, now)
        # After `timeout` the coordinator itself ends the job, with a better
        # explanation. So wait one second longer for the coordinator.
        if now - self._short_since <= timeout + 1.0:
            return ""
        few = f"{count} of at least {least} workers are left"
        return f"{few}, and there was no place for others in {timeout:g} s"

    # -- events while the job runs -----------------------------------------------------

    def is_over(self) -> bool:
        """Returns whether all members have ended, or a worker failed in every slot."""
        if self._table.members or self.slots.closed:
            # After a failure nobody tells the spares to end, so ringrun kills them.
            succeeds = self.slots.closed
            return self._table.is_over() and (self.spares.ended or not succeeds)
        return self.slots.all_failed()

    def handle_event(self, event: str, worker: Worker, text: str, now: float) -> None:
        if event == "fenced":
            self.fence(worker, text, now)
        elif event == "failure":
            # Fence the worker even if it is not a member yet. Otherwise a worker that
            # hangs would keep its slot.
            self.fence(worker, f"failed: {text}", now)
        elif event == "finished":
            self.slots.closed = True

    def handle_exit(self, worker: Worker, code: int, text: str, now: float) -> None:
        self._table.record_end(worker, code, text, now)
        if text:
            worker.streams.clear()
        if code:
            self._inform_coordinator(worker)
            return
        # The worker's message that its program has finished may not have reached the
        # coordinator yet, so report the end later.
        self._due_reports.append((now + _REPORT_DELAY, worker))
        worker.coordinator_answered = self.coordinator is None
        if self.coordinator is not None:
            self.coordinator.ended(worker.number)

    def _inform_coordinator(self, worker: Worker) -> None:
        """Reports to the coordinator that a worker runs, or why it has ended."""
        if self.coordinator is None:
            return
        if worker.is_running:
            self.coordinator.expected(worker.number)
            return
        why = self._table.describe_end(worker).lstrip(": ") if worker.exit_code else ""
        why = why or "ended without an error"
        self.coordinator.process_ended(worker.number, why, worker.may_be_succeeded)

    def fence(self, worker: Worker, why: str, now: float) -> None:
        """Excludes a worker from the job that the coordinator has declared lost."""
        worker.fence_reason, worker.with_group = why, why.startswith(WITH_GROUP)
        if not worker.slot.host:  # no agent reports the end of this worker
            self.handle_exit(worker, 255, why, now)
        if worker.is_running and worker.fenced is None:
            worker.fenced = now
            self._unannounced.append(worker)

    def dismiss(self, number: int, now: float) -> None:
        """Asks a worker and its group to leave, because the worker's slot is gone."""
        worker = self._table.workers[number]
        who = self._table.describe(worker, place=True)
        self._console.note(f"{who} is asked to leave: its slot is gone")
        for mate in self._table.group_of(worker):
            if mate.is_running and mate.asked_to_leave is None:
                mate.asked_to_leave = now
                self._agents.signal(signal.SIGTERM, [mate.number], alone=True)

    def tick(self, now: float) -> None:
        """Handles ended workers, kills workers that should have ended, prints lines."""
        for worker in self._table.workers.values():
            if worker.settled:
                continue
            if worker.exit_code is not None:
                late = now - worker.end_time > _OUTPUT_DELAY
                if (late or not worker.streams) and not _is_unexplained(worker):
                    self._settle(worker, now)
            elif not worker.killed and now > _kill_time(worker):
                worker.killed = True
                self._agents.signal(signal.SIGKILL, [worker.number])
        for worker in list(self._unannounced):
            # If the worker has ended meanwhile, `_settle` prints a better explanation.
            due = (worker.fenced or 0.0) + _OUTPUT_DELAY
            if worker.is_running and now > due:
                self._unannounced.remove(worker)
                self._note_end(worker, worker.loss_text)
        while self._due_reports and self._due_reports[0][0] <= now:
            self._inform_coordinator(self._due_reports.pop(0)[1])
        self.spares.tick(now, silent=self.silent)
        if self.coordinator is not None and not self.silent:
            self.coordinator.tick(now)

    def _settle(self, worker: Worker, now: float) -> None:
        """Releases the slot of an ended worker, and prints a line about the worker."""
        worker.settled = True
        if not worker.streams:
            self._console.remove(worker.number)
        if worker.dismissed or worker.asked_to_leave is not None:
            asked = worker.asked_to_leave is not None
            self.slots.record_leave(worker.slot, asked=asked)
            # Spares also leave at the end of the job, which is no news.
            if not (self.slots.closed and worker.spare and worker.rank is None):
                self._note_end(worker, None if worker.exit_code else " has left")
        elif worker.exit_code == 0 and worker.fenced is None:
            self.slots.closed = True
        else:
            announced = worker.fenced is not None and worker not in self._unannounced
            self._unannounced = [w for w in self._unannounced if w is not worker]
            own_fault = self._table.failed_by_itself(worker)
            pause = self.slots.record_failure(
                worker.slot,
                member_for=_time_of_use(worker),
                own_fault=own_fault,
                now=now,
            )
            # If the job is over, ringrun's last line contains the explanation.
            if not announced and not self.is_over():
                text = None if worker.exit_code else worker.loss_text
                self._note_end(worker, text, pause)
                self.spares.record_failure(worker, own_fault=own_fault)
            self._note_blacklisted(worker.slot.host, now)

    def _note_end(self, worker: Worker, text: str | None, pause: float = 0.0) -> None:
        """Prints a line about a worker that was lost or has left.

        Args:
            text: the text after the worker's name, or None to describe the exit code.
            pause: seconds until another worker starts in the worker's slot.
        """
        if self.silent:
            return
        table = self._table
        line = table.describe(worker, place=table.several_hosts())
        line += table.describe_end(worker) if text is None else text
        if worker.rank is not None:
            line += table.describe_remaining()
        elif 0 < pause < math.inf and self._blacklist is None:
            line += f"; the next try is in {pause:g} s"
        self._console.note(line)

    def _note_blacklisted(self, host: str, now: float) -> None:
        blacklist = self._blacklist
        seconds = None if blacklist is None else blacklist.take_announcement(host, now)
        if seconds is None or self.silent or self.is_over():
            return
        how_long = "any more" if seconds == math.inf else f"for {seconds:.0f} s"
        self._console.note(
            f"host {host} gets no worker {how_long}: one has failed there"
        )


def _is_unexplained(worker: Worker) -> bool:
    """Returns whether the reason for a worker's end without an error is unknown yet.

    If the coordinator has dismissed the worker, another worker starts in its slot. If
    not, the worker has reached the end of its program, and the job is finishing.
    """
    known = worker.coordinator_answered or worker.finished or worker.dismissed
    return worker.exit_code == 0 and not known


def _time_of_use(worker: Worker) -> float | None:
    """Returns for how many seconds a worker was a member, or None if it never was.

    A spare that was ready has started well, so its slot gets another one immediately.
    """
    if worker.rank is None:
        return math.inf if worker.spare and worker.ready else None
    return worker.end_time - worker.join_time


def _kill_time(worker: Worker) -> float:
    """Returns when to kill a worker that does not end by itself; infinity for never.

    A worker whose group was lost is killed immediately, because it has no error to
    report and the job needs its slot.
    """
    grace = 0.0 if worker.with_group else _FENCE_TIMEOUT
    fenced = math.inf if worker.fenced is None else worker.fenced + grace
    asked = worker.asked_to_leave
    leave = math.inf if asked is None else asked + _LEAVE_TIMEOUT
    return min(fenced, leave)
