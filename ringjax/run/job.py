"""One job of ringrun: finds hosts, starts coordinator and ranks, handles losses, ends.

A single loop handles the reports of the agents and of the coordinator. Static and
elastic jobs differ in what follows a loss. In a static job the first failed rank ends
the job: the other ranks get one second to fail with a clear error of their own, then
SIGTERM, then SIGKILL. In an elastic job the other ranks go on, and a
`ReplacementPolicy` decides which workers are started. The ranks themselves are started
by hosts/agent.py.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringjax.run.console import Console
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Message
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.hosts.slots import ANY_HOST, HostSlots, assign_slots, natural_order
from ringjax.run.monitor.job_monitor import JobMonitor
from ringjax.run.shutdown import AFTER_FAILURE, TO_LEAVE, JobOutcome, Shutdown
from ringjax.run.workers import Worker, WorkerSlot, WorkerTable, take_events

if TYPE_CHECKING:
    from ringjax.membership.coordinator import Coordinator
    from ringjax.run.elastic.coordinator_process import CoordinatorProcess
    from ringjax.run.elastic.elastic_settings import ElasticSettings
    from ringjax.run.elastic.replacement_policy import ReplacementPolicy
    from ringjax.run.hosts.agent_listener import AgentListener
    from ringjax.run.hosts.discovery import HostDiscovery

_NOTE_AFTER = 10.0  # seconds until it is said what is waited for
_TICK = 0.1  # seconds between two looks at the clock
_HANG_TIMEOUT = 10.0  # seconds for a rank that has told that it fails
_GATHER_TIME = 2.0  # seconds for agents with ranks of a job that had begun


class Job:
    """A running job. `run` starts it, returns when nothing of it is left.

    Args:
        spec: what to run; it has the slots of a static job.
        console: shows the output.
        size: number of the ranks of a static job whose hosts come by themselves.
        elastic: where and how many; None: the job is static.
        elastic_timeout: seconds to wait for hosts, or for workers if they are too few.
        failure_timeout: seconds of silence until a member is lost.

    Attributes:
        console: shows the output.
        monitor: knows how the ranks are.
    """

    def __init__(
        self,
        spec: JobSpec,
        console: Console,
        size: int = 0,
        elastic: ElasticSettings | None = None,
        *,
        elastic_timeout: float = 600.0,
        failure_timeout: float = 5.0,
    ) -> None:
        self._spec, self._elastic, self.console = spec, elastic, console
        self._size = size or len(spec.slots)
        self._timeout, self._failure_timeout = elastic_timeout, failure_timeout
        self._agents = AgentPool(spec, console, self)
        self.monitor = JobMonitor(
            self._agents, console, spec, elastic=elastic is not None
        )
        self._coordinator: Coordinator | CoordinatorProcess | None = None
        self._discovery: HostDiscovery | AgentListener | None = None
        self._hosts: Sequence[HostSlots] = ()
        self._keeper: ReplacementPolicy | None = None
        self._shared: dict[str, str] = {}
        self._results: dict[int, bytearray] = {}
        self._signals: list[int] = []
        self._stop = self._leave = ""
        self._detaching = False
        least, group = (elastic.min_np, elastic.group) if elastic else (self._size, 1)
        self._table = WorkerTable(
            least, console.last_error, group, elastic=elastic is not None
        )
        self._shutdown = Shutdown() if elastic is None else Shutdown(TO_LEAVE)
        if elastic is not None:
            from ringjax.run.elastic.replacement_policy import (
                ReplacementPolicy,  # costs others nothing
            )

            self._keeper = ReplacementPolicy(
                elastic, self._table, self._agents, console
            )

    def run(self) -> JobOutcome:
        """Start everything, wait for the end, leave nothing behind."""
        self.monitor.open()
        try:
            self._agents.start()
            self._find_hosts()
            self._wait_for_hosts()
            if not self._shutdown.started:
                self._start()
            while not (self._is_over() or self._shutdown.given_up):
                self._run_once()
        finally:
            self._end()
        return self._outcome()

    def interrupt(self, number: int) -> None:
        """End the job because ringrun got a signal; a second one ends it at once."""
        self._shutdown.interrupt(number)

    def forward_signal(self, number: int) -> None:
        """Soon the ranks get a signal that ringrun got; in an elastic job all leave.

        To workers of an elastic job the signal would be the end.
        """
        self._signals.append(number)

    def time_left(self) -> float | None:
        """See `Shutdown.patience`."""
        return self._shutdown.time_left

    def detach(self) -> bool:
        """SIGTERM: whether the job goes on without this ringrun, on hosts that came.

        Its own workers leave at their next commit. Asked again, by a second signal, it
        is not so, and the job ends. A static job never goes on.
        """
        started = self._keeper is not None and self._coordinator is not None
        if not started or self._shutdown.started or self._detaching:
            return False
        self._detaching = len(self._own_workers()) < len(self._table.running())
        return self._detaching

    def _own_workers(self) -> list[Worker]:
        """The workers on hosts that ringrun itself has reached (not --listen)."""
        workers = self._table.running()
        return [w for w in workers if not self._agents.has_joined(w.slot.host)]

    def _is_over(self) -> bool:
        if self._keeper is None or self._shutdown.started:
            return not self._table.running()
        return not self._own_workers() if self._detaching else self._keeper.is_over()

    # Starting.

    def _find_hosts(self) -> None:
        """Takes note of the hosts, or begins to look for them."""
        spec, elastic, keeper = self._spec, self._elastic, self._keeper
        if spec.listening is not None:
            from ringjax.run.hosts.agent_listener import (
                AgentListener,  # costs others nothing
            )

            hooks = (self._host_joined, keeper.takeover.resolve_job) if keeper else ()
            self._discovery = AgentListener(
                spec, self._agents, self.console.note, *hooks
            )
        elif elastic is not None and elastic.script:
            from ringjax.run.hosts.discovery import HostDiscovery

            self._discovery = HostDiscovery(
                elastic.script, elastic.slots, self._agents, self.console.note
            )
        if elastic is not None and keeper is not None:
            self._hosts = elastic.hosts or ()
            keeper.slots.update(self._hosts)

    def _wait_for_hosts(self) -> None:
        """Until there is room for enough workers, or ranks of the job have come."""
        begun, noted, elastic = time.monotonic(), False, self._elastic
        listens = self._spec.listening is not None
        least = "" if elastic is None else "at least "
        while self._discovery is not None and not self._shutdown.started:
            if self._keeper is not None and self._keeper.takeover.resumes:
                return
            waited = time.monotonic() - begun
            needed, settled = self._size, True
            if elastic is not None:
                whole = listens and waited < self._spec.start_timeout
                needed = (elastic.np if whole else None) or elastic.min_np
                settled = not listens or waited > _GATHER_TIME
            count = sum(host.slots for host in self._discovery.hosts or ())
            name, why = self._discovery.name, self._discovery.problem
            found = f"{name} found {count} of {least}{needed} slots in"
            if elastic is not None and self._discovery.unusable:
                self._give_up(f"{name} {elastic.script}: {why}")
            elif count >= needed and settled:
                return
            elif waited > self._timeout:
                self._give_up(f"{found} {self._timeout:g} s" + f", {why}" * bool(why))
            elif waited > _NOTE_AFTER and not noted:
                noted = True
                self.console.note(f"{found} {_NOTE_AFTER:g} s; waits for more")
            else:
                self._run_once()

    def _start(self) -> None:
        """Starts the coordinator; then the ranks of a static job."""
        if self._keeper is None and self._discovery is not None:
            found = sorted(self._discovery.hosts or (), key=natural_order)
            self._spec = replace(self._spec, slots=assign_slots(found, self._size))
        coordinator, ranks = self._make_coordinator()
        self._coordinator = coordinator
        coordinator.start()
        self._agents.selector.register(
            coordinator.wakeup, selectors.EVENT_READ, lambda: None
        )
        where = ",".join(coordinator.addresses)
        self._shared["RINGJAX_RENDEZVOUS"] = where
        if self._spec.verbose:
            job = self._shared["RINGJAX_JOB"]
            self.console.note(f"job {job}: {ranks}, rendezvous at {where}")
        if self._keeper is None:
            slots = [
                WorkerSlot(slot.host, slot.local_rank, slot.rank)
                for slot in self._spec.slots
            ]
            self._spawn([self._table.add(slot) for slot in slots])

    def _make_coordinator(self) -> tuple[Coordinator | CoordinatorProcess, str]:
        """The coordinator; and how many ranks it waits for, in words."""
        spec, elastic, keeper = self._spec, self._elastic, self._keeper
        named = [slot.host for slot in spec.slots] + [host.name for host in self._hosts]
        hosts = list(dict.fromkeys(named))
        remote = (
            self._agents.remote_hosts(hosts) if self._discovery is None else [ANY_HOST]
        )
        secret, where = spec.rendezvous_options(remote)
        job = secrets.token_hex(8)
        given = {**where, "start_timeout": spec.start_timeout, "tls": spec.tls}
        self._shared["RINGJAX_SECRET"] = secret.hex()
        if keeper is None or elastic is None:
            from ringjax.membership.coordinator import Coordinator  # slow

            self._shared["RINGJAX_JOB"], given["np"] = job, self._size
            coordinator = Coordinator(secret, job, on_loss="stop", **given)
            return coordinator, f"{self._size} ranks"
        job = self._shared["RINGJAX_JOB"] = keeper.takeover.resolve_job({"job": job})
        count = elastic.initial_size(len(keeper.slots.slots))
        spread = len(hosts) > 1 or spec.listening is not None
        self._shared |= {"RINGJAX_ELASTIC": "1", "RINGJAX_SPREAD": str(int(spread))}
        given |= {
            **elastic.coordinator_options,
            "np": count,
            "elastic_timeout": self._timeout,
        }
        given["failure_timeout"] = self._failure_timeout
        ranks = f"{count} ranks ({elastic.min_np} to {elastic.max_np})"
        return keeper.make_coordinator(secret, job, **given), ranks

    def _spawn(self, workers: Sequence[Worker]) -> None:
        """Has agents start workers."""
        for host in dict.fromkeys(worker.slot.host for worker in workers):
            orders = [self._order(w) for w in workers if w.slot.host == host]
            if self._spec.stdin and orders[0]["id"] == 0:
                self._agents.connect_stdin()
                orders[0]["descriptors"] = 1
            self._agents.spawn(host, orders, self._spec.env, self._spec.payload)

    def _order(self, worker: Worker) -> Message:
        number, keeper = worker.number, self._keeper
        if keeper is None:
            slot = self._spec.slots[number]
        else:
            slot = keeper.slots.slot_info(worker.slot)
        env = {**slot.environment(), **self._shared}
        order: Message = {"id": number, "argv": [*self._spec.command], "env": env}
        if keeper is not None:
            env["RINGJAX_WORKER"], order["takes_group"] = str(number), True
        return order

    # While it runs.

    def _run_once(self) -> None:
        """One round of the loop: events, the coordinator, the clock, the plan."""
        if not self._agents.poll(self._shutdown.timeout(_TICK), self._take_decisions):
            self.console.idle()
        now = time.monotonic()
        self.monitor.tick(now)
        if self._discovery is not None and not self._shutdown.started:
            self._discovery.tick(now)
        if self._keeper is None:
            self._stop_at_a_loss(now)
        else:
            self._replace_losses(self._keeper, now)
        for number in self._shutdown.due_signals():
            self._table.stopping = True
            self._signal(number)
        while self._keeper is None and self._signals:
            self._signal(self._signals.pop(0), alone=True)

    def _stop_at_a_loss(self, now: float) -> None:
        """The first rank that fails ends a static job."""
        if not self._shutdown.started:
            hung = self._table.hung(now - _HANG_TIMEOUT)
            if hung is not None:
                self.console.note(
                    f"rank {hung.number} has failed, and its process has not ended in "
                    f"{_HANG_TIMEOUT:g} s: a thread or an exit handler of it goes on"
                )
            if hung is not None or self._table.failed():
                self._end_after_failure()

    def _replace_losses(self, keeper: ReplacementPolicy, now: float) -> None:
        """An elastic job goes on, and others take the places of workers that end."""
        keeper.silent = self._shutdown.started
        keeper.tick(now)
        if not self._shutdown.started:
            self._follow_hosts(keeper, now)
            if not self._detaching:
                self._spawn(keeper.add_workers(now))
            if why := keeper.shortage(now, self._timeout):
                self._give_up(why)
        signal_name = signal.Signals(self._signals[0]).name if self._signals else ""
        self._leave = self._leave or signal_name or self._agents.end_requested
        if self._leave and not (keeper.slots.closed or self._shutdown.started):
            keeper.slots.closed = True  # nobody joins any more
            self.console.note(f"{self._leave}: all ranks leave at their next commit")
            self._signal(signal.SIGTERM)

    def _signal(self, number: int, *, alone: bool = False) -> None:
        """Signals the ranks with all that they have started, or them alone.

        What a rank of an elastic job has started may have to help it to its next commit
        when it is asked to leave; and may not know what to do with a signal that is
        handed on.
        """
        if self._keeper is not None and number == signal.SIGTERM:
            alone = bool(self._leave) or self._shutdown.signalled == signal.SIGTERM
        running = [worker.number for worker in self._table.running()]
        self._agents.signal(number, running, alone=alone)

    def _follow_hosts(self, keeper: ReplacementPolicy, now: float) -> None:
        """A worker whose host or slot is gone is asked to leave."""
        if self._discovery is None:
            return
        if self._detaching:
            self._discovery.drop_static_hosts()
        hosts = self._discovery.hosts
        if hosts is None or hosts == self._hosts:
            return
        self._hosts = hosts
        for number in keeper.slots.update(hosts):
            if self._table.workers[number].is_running:
                keeper.dismiss(number, now)

    def _host_joined(self, host: str, hello: Message) -> None:
        """The agent of a host has come by itself, perhaps with ranks."""
        keeper = self._keeper
        assert keeper is not None
        self._follow_hosts(keeper, time.monotonic())
        keeper.takeover.add_host(host, hello)
        self._agents.save_job_state(keeper.takeover.job_state())

    def _give_up(self, why: str) -> None:
        """The job cannot go on."""
        if not self._shutdown.started:
            goes_on = self._keeper is not None and self._table.members
            self._stop = why if goes_on else f"the job did not start: {why}"
            self._end_after_failure()

    def _end_after_failure(self) -> None:
        # Ranks that never met have no clear error of their own to wait for.
        self._shutdown.start(AFTER_FAILURE, None if self._table.members else 0.0)

    def _take_decisions(self) -> None:
        """Takes what it decided, before who ended."""
        if self._coordinator is None:
            return
        for event in take_events(self._coordinator):
            self._handle_event(*event)

    def _handle_event(self, event: str, *details: Any) -> None:
        match event, *details:
            case ["members", _, kind, members]:
                self._start_epoch(kind, members)
            case ["waiting", text]:
                if self._table.count_members():
                    self.console.note(text)
            case ["stop", text]:
                # A rank of a static job that has told of an error says more.
                if self._keeper is not None or not self._table.with_report():
                    self._give_up(text)
            case [_, int(number), *text]:
                now, why = time.monotonic(), "".join(text)
                worker = self._table.record_event(event, number, why, now)
                if self._keeper is not None:
                    self._keeper.handle_event(event, worker, why, now)

    def _start_epoch(self, kind: str, members: dict[int, int]) -> None:
        """An epoch has begun."""
        table, keeper = self._table, self._keeper
        gone = table.members.keys() - members.keys()
        again = bool(table.members)
        if again and kind == "start" and keeper is not None:
            self.console.note(
                "the last rank is lost: newcomers begin afresh, or from a checkpoint "
                "if the program keeps one"
            )
        new = table.start_epoch(members, time.monotonic())
        lost = sum(not table.workers[number].dismissed for number in gone)
        self.monitor.members_changed(len(new) if again else 0, lost)
        self.console.ranks.update(members)
        for worker in new if again else ():
            self.console.note(table.describe_join(worker, place=table.several_hosts()))
        if self._elastic is None or keeper is None:
            return
        keeper.slots.grow()
        limit = self._elastic.reset_limit
        if limit is not None and table.resets > limit:
            changed = f"the members have changed {table.resets} times"
            self._give_up(f"{changed}; the reset limit is {limit}")

    # Called by the fleet.

    def started(self, name: int, pid: int) -> None:
        """Notes the process."""
        worker = self._table.workers[name]
        worker.pid = pid
        if self._spec.verbose:
            kind = "rank" if self._keeper is None else "worker"
            where = worker.slot.host
            self.console.note(f"{kind} {name}: process {pid} on {where}")

    def wrote(self, name: int, stream: str, data: bytes) -> None:
        """Shows it, or keeps it if it is a result."""
        if stream == "result":
            self._results.setdefault(name, bytearray()).extend(data)
            return
        if not data and name >= 0:  # else it is an agent's client
            self._table.workers[name].streams.discard(stream)
        self.console.write(name, stream, data)

    def exited(self, name: int, code: int, text: str) -> None:
        """Notes that a rank has ended; the coordinator hears of it at once."""
        worker, now = self._table.workers[name], time.monotonic()
        self.monitor.rank_ended(name)
        if not worker.is_running:
            return
        if self._keeper is not None:
            self._keeper.handle_exit(worker, code, text, now)
            return
        self._table.record_end(worker, code, text, now)
        if not code and self._coordinator is not None:
            # Nobody has to wait for the timeout if others wait for this rank.
            self._coordinator.process_ended(name, "ended without an error")

    def host_lost(self, names: Sequence[int], text: str) -> None:
        """Notes that the ranks of a host are lost."""
        for name in names:
            self._table.workers[name].end_confirmed = False
            self.exited(name, 255, text)

    # The end.

    def _end(self) -> None:
        """Have every agent kill what is left, read the last output, close."""
        limit = 2.0 if self._shutdown.signalled is None else 0.3
        if self._discovery is not None:
            self._discovery.close()
        if self._detaching and not self._shutdown.started:
            self._agents.detach_joined()
        self._table.stopping = True  # ringrun ends what still runs
        self._agents.end(limit)
        self._take_decisions()
        if self._coordinator is not None:
            self._coordinator.close()
        self.monitor.close()
        self._agents.close(limit, self._outcome().exit_code)
        self.console.close()

    def _outcome(self) -> JobOutcome:
        if (number := self._shutdown.signalled) is not None:
            name = signal.Signals(number).name
            # The reader of ringrun's output has gone: there is nobody to tell.
            why = "" if name == "SIGPIPE" else f"ended by {name}"
            return JobOutcome(128 + number, reason=why)
        if self._detaching:
            why = "ended by SIGTERM; the job goes on, and waits for another ringrun"
            return JobOutcome(128 + signal.SIGTERM, reason=why)
        blobs = {number: bytes(data) for number, data in self._results.items()}
        return self._table.outcome(blobs, self._stop, bool(self._leave))
