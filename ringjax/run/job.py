"""Runs one job: finds hosts, starts coordinator and ranks, and handles failures.

One loop handles the messages of the agents and the events of the coordinator. In a
static job the first failed rank ends the job: ringrun waits one second, in which the
other ranks can report clear errors of their own, then sends SIGTERM and later SIGKILL.
In an elastic job the other ranks continue, and a `ReplacementPolicy` decides which
workers ringrun starts. hosts/agent.py starts the processes of the ranks.
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
from ringjax.run.outcome import JobOutcome
from ringjax.run.shutdown import AFTER_FAILURE, TO_LEAVE, Shutdown
from ringjax.run.workers import Worker, WorkerSlot, WorkerTable, take_events

# ringrun must start quickly, so each job imports only those modules that it needs.
if TYPE_CHECKING:
    from ringjax.membership.coordinator import Coordinator
    from ringjax.run.elastic.coordinator_process import CoordinatorProcess
    from ringjax.run.elastic.elastic_settings import ElasticSettings
    from ringjax.run.elastic.replacement_policy import ReplacementPolicy
    from ringjax.run.hosts.agent_listener import AgentListener
    from ringjax.run.hosts.discovery import ScriptDiscovery

_NOTE_AFTER = 10.0  # seconds until the user reads that ringrun waits for hosts
_TICK = 0.1  # the longest wait of one round of the loop, in seconds
_HANG_TIMEOUT = 10.0  # seconds until a rank that has reported an error is killed
_GATHER_TIME = 2.0  # seconds to wait for agents with ranks of an earlier ringrun


class Job:
    """A job. `run` starts the job, and returns when all its processes have ended.

    Args:
        size: number of ranks of a static job whose hosts join by `ringrun --join`.
            In other static jobs, `spec` contains the slots of the ranks.
        elastic: the limits of an elastic job, or None for a static job.
    """

    def __init__(
        self,
        spec: JobSpec,
        console: Console,
        size: int = 0,
        elastic: ElasticSettings | None = None,
    ) -> None:
        self._spec, self.console = spec, console
        self._size = size or len(spec.slots)
        # How long to wait for hosts, or for new workers if fewer than the minimum are
        # left.
        self._timeout = spec.config.elastic_timeout
        is_elastic = elastic is not None
        self._agents = AgentPool(spec, console, self)
        self._monitor = JobMonitor(self._agents, console, spec, elastic=is_elastic)
        self._coordinator: Coordinator | CoordinatorProcess | None = None
        self._discovery: ScriptDiscovery | AgentListener | None = None
        self._hosts: Sequence[HostSlots] = ()
        self._env: dict[str, str] = {}  # variables of all ranks
        self._results: dict[int, bytearray] = {}
        self._signals: list[int] = []  # signals that ringrun must forward to the ranks
        self._stop = ""  # the reason why the job fails
        self._leave = ""  # the reason why ringrun asks all ranks to leave
        self._detaching = False
        least, group = (elastic.min_np, elastic.group) if elastic else (self._size, 1)
        self._table = WorkerTable(least, console.last_error, group, elastic=is_elastic)
        self.shutdown = Shutdown(TO_LEAVE) if is_elastic else Shutdown()
        self._policy: ReplacementPolicy | None = None  # None in a static job
        if elastic is not None:
            from ringjax.run.elastic.replacement_policy import ReplacementPolicy

            self._policy = ReplacementPolicy(
                elastic, self._table, self._agents, console
            )

    @property
    def goodput(self) -> str:
        """The line of ringrun that divides the job's time into its parts.

        It is "" before the job has ended, and if no rank has made a step.
        """
        return self._monitor.goodput

    def run(self) -> JobOutcome:
        self._monitor.open()
        try:
            self._agents.start()
            self._find_hosts()
            self._wait_for_hosts()
            if not self.shutdown.started:
                self._start()
            while not (self._is_over() or self.shutdown.given_up):
                self._run_once()
        finally:
            self._end()
        return self._outcome()

    # -- signals (both methods run in a signal handler) --------------------------------

    def forward_signal(self, number: int) -> None:
        """Forwards a signal to the ranks. Makes the ranks of an elastic job leave.

        Receiving the signal itself would end the workers of an elastic job.
        """
        self._signals.append(number)

    def detach(self) -> bool:
        """Handles SIGTERM. Returns whether the job continues without this ringrun.

        An elastic job continues if some ranks run on hosts of `ringrun --join`. The
        agents of these hosts wait for another ringrun, and all other workers leave at
        their next commit. In a static job, or after a second SIGTERM, the job ends.
        """
        started = self._policy is not None and self._coordinator is not None
        if not started or self.shutdown.started or self._detaching:
            return False
        self._detaching = len(self._own_workers()) < len(self._table.running())
        return self._detaching

    def _own_workers(self) -> list[Worker]:
        """Returns the running workers on hosts whose agents ringrun has started."""
        workers = self._table.running()
        return [w for w in workers if not self._agents.has_joined(w.slot.host)]

    def _is_over(self) -> bool:
        if self._policy is None or self.shutdown.started:
            return not self._table.running()
        return not self._own_workers() if self._detaching else self._policy.is_over()

    # -- the start ---------------------------------------------------------------------

    def _find_hosts(self) -> None:
        """Uses the listed hosts, or starts a script or a listener to find hosts."""
        spec, policy = self._spec, self._policy
        script = policy.settings.script if policy is not None else ""
        if spec.listening is not None:
            from ringjax.run.hosts.agent_listener import AgentListener

            hooks = (self._host_joined, policy.takeover.resolve_job) if policy else ()
            self._discovery = AgentListener(
                spec, self._agents, self.console.note, *hooks
            )
        elif policy is not None and script:
            from ringjax.run.hosts.discovery import ScriptDiscovery

            self._discovery = ScriptDiscovery(
                script, policy.settings.slots, self._agents, self.console.note
            )
        if policy is not None:
            self._hosts = policy.settings.hosts or ()
            policy.slots.update(self._hosts)

    def _wait_for_hosts(self) -> None:
        """Waits for enough slots, or for the ranks of an earlier ringrun."""
        begun, noted, policy = time.monotonic(), False, self._policy
        listens = self._spec.listening is not None
        least = "" if policy is None else "at least "
        while self._discovery is not None and not self.shutdown.started:
            if policy is not None and policy.takeover.resumes:
                return
            waited = time.monotonic() - begun
            needed, settled = self._size, True
            if policy is not None:
                # During the start timeout, wait for the slots of -np, and then for
                # those of --min-np.
                limits = policy.settings
                whole = listens and waited < self._spec.config.start_timeout
                needed = (limits.np if whole else None) or limits.min_np
                settled = not listens or waited > _GATHER_TIME
            count = sum(host.slots for host in self._discovery.hosts or ())
            name, why = self._discovery.name, self._discovery.problem
            found = f"{name} found {count} of {least}{needed} slots in"
            if policy is not None and self._discovery.unusable:
                self._give_up(f"{name} {policy.settings.script}: {why}")
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
        if self._policy is None and self._discovery is not None:
            found = sorted(self._discovery.hosts or (), key=natural_order)
            self._spec = replace(self._spec, slots=assign_slots(found, self._size))
        coordinator, ranks = self._make_coordinator()
        self._coordinator = coordinator
        coordinator.start()
        self._agents.selector.register(
            coordinator.wakeup, selectors.EVENT_READ, lambda: None
        )
        where = ",".join(coordinator.addresses)
        self._env["RINGJAX_RENDEZVOUS"] = where
        if self._spec.verbose:
            job = self._env["RINGJAX_JOB"]
            self.console.note(f"job {job}: {ranks}, rendezvous at {where}")
        if self._policy is None:
            slots = (
                WorkerSlot(slot.host, slot.local_rank, slot.rank)
                for slot in self._spec.slots
            )
            self._spawn([self._table.add(slot) for slot in slots])

    def _make_coordinator(self) -> tuple[Coordinator | CoordinatorProcess, str]:
        """Returns the coordinator, and a text that says how many ranks it expects."""
        spec, policy, config = self._spec, self._policy, self._spec.config
        named = [slot.host for slot in spec.slots] + [host.name for host in self._hosts]
        hosts = list(dict.fromkeys(named))
        remote = (
            self._agents.remote_hosts(hosts) if self._discovery is None else [ANY_HOST]
        )
        secret, addresses, port = spec.rendezvous_options(remote)
        job = secrets.token_hex(8)
        self._env["RINGJAX_SECRET"] = secret.hex()
        if policy is None:
            from ringjax.membership.coordinator import Coordinator

            self._env["RINGJAX_JOB"] = job
            self._monitor.expect(self._size)
            static = Coordinator(
                secret,
                job,
                np=self._size,
                on_loss="stop",
                start_timeout=config.start_timeout,
                tls=config.tls,
                hosts=addresses,
                port=port,
            )
            return static, f"{self._size} ranks"
        from ringjax.run.elastic.coordinator_process import CoordinatorProcess

        limits = policy.settings
        job = self._env["RINGJAX_JOB"] = policy.takeover.resolve_job({"job": job})
        count = limits.initial_size(len(policy.slots.slots))
        self._monitor.expect(count)
        spread = len(hosts) > 1 or spec.listening is not None
        self._env |= {"RINGJAX_ELASTIC": "1", "RINGJAX_SPREAD": str(int(spread))}
        elastic = CoordinatorProcess(
            secret,
            job,
            note=self.console.note,
            resume=policy.takeover.resumes,
            np=count,
            min_np=limits.min_np,
            max_np=limits.max_np,
            group=limits.group,
            start_timeout=config.start_timeout,
            elastic_timeout=config.elastic_timeout,
            failure_timeout=config.failure_timeout,
            tls=config.tls,
            hosts=addresses,
            port=port,
        )
        policy.use_coordinator(elastic)
        return elastic, f"{count} ranks ({limits.min_np} to {limits.max_np})"

    def _spawn(self, workers: Sequence[Worker]) -> None:
        self._monitor.ranks_started([worker.number for worker in workers])
        for host in dict.fromkeys(worker.slot.host for worker in workers):
            orders = [self._spawn_order(w) for w in workers if w.slot.host == host]
            if self._spec.stdin and orders[0]["id"] == 0:
                self._agents.connect_stdin()
                orders[0]["descriptors"] = 1
            self._agents.spawn(host, orders, self._spec.env, self._spec.payload)

    def _spawn_order(self, worker: Worker) -> Message:
        number, policy = worker.number, self._policy
        if policy is None:
            slot = self._spec.slots[number]
        else:
            slot = policy.slots.slot_info(worker.slot)
        env = {**slot.environment(), **self._env}
        order: Message = {"id": number, "argv": [*self._spec.command], "env": env}
        if policy is not None:
            env["RINGJAX_WORKER"], order["kills_group"] = str(number), True
        return order

    # -- the loop ----------------------------------------------------------------------

    def _run_once(self) -> None:
        """Waits for events and handles them. Then handles timeouts and signals."""
        timeout = self.shutdown.timeout(_TICK)
        if not self._agents.poll(timeout, self._take_decisions):
            self.console.idle()
        now = time.monotonic()
        self._monitor.tick(now)
        if self._discovery is not None and not self.shutdown.started:
            self._discovery.tick(now)
        if self._policy is None:
            self._stop_at_a_loss(now)
        else:
            self._replace_losses(self._policy, now)
        for number in self.shutdown.due_signals():
            self._table.stopping = True
            self._signal(number)
        while self._policy is None and self._signals:
            self._signal(self._signals.pop(0), alone=True)

    def _stop_at_a_loss(self, now: float) -> None:
        if not self.shutdown.started:
            hung = self._table.hung(now - _HANG_TIMEOUT)
            if hung is not None:
                self.console.note(
                    f"rank {hung.number} has failed, and its process has not ended in "
                    f"{_HANG_TIMEOUT:g} s: a thread or an exit handler of it goes on"
                )
            if hung is not None or self._table.failed():
                self._end_after_failure()

    def _replace_losses(self, policy: ReplacementPolicy, now: float) -> None:
        """Starts workers in place of those that have ended, or ends the job."""
        policy.silent = self.shutdown.started
        policy.tick(now)
        if policy.settings.spares:
            self._monitor.set_spares(policy.spares.states())
        if not self.shutdown.started:
            self._follow_hosts(policy, now)
            if not self._detaching:
                self._spawn(policy.add_workers(now))
            if why := policy.shortage(now, self._timeout):
                self._give_up(why)
        forwarded = signal.Signals(self._signals[0]).name if self._signals else ""
        self._leave = self._leave or forwarded or self._agents.end_requested
        if self._leave and not (policy.slots.closed or self.shutdown.started):
            policy.slots.closed = True  # start no more workers
            self.console.note(f"{self._leave}: all ranks leave at their next commit")
            self._signal(signal.SIGTERM)

    def _signal(self, number: int, *, alone: bool = False) -> None:
        """Sends a signal to the process groups of the ranks, or only to the ranks.

        A request to leave (SIGTERM) is sent to the rank only, because the rank may need
        its children until its next commit. A forwarded signal is sent to the rank only,
        because its children may not handle the signal.
        """
        if self._policy is not None and number == signal.SIGTERM:
            alone = bool(self._leave) or self.shutdown.signalled == signal.SIGTERM
        running = [worker.number for worker in self._table.running()]
        self._agents.signal(number, running, alone=alone)

    def _follow_hosts(self, policy: ReplacementPolicy, now: float) -> None:
        """Asks workers to leave whose host or slot is not in the list of hosts now."""
        if self._discovery is None:
            return
        if self._detaching:
            self._discovery.drop_static_hosts()
        hosts = self._discovery.hosts
        if hosts is None or hosts == self._hosts:
            return
        self._hosts = hosts
        for number in policy.slots.update(hosts):
            if self._table.workers[number].is_running:
                policy.dismiss(number, now)

    def _host_joined(self, host: str, hello: Message) -> None:
        """Takes over the ranks that a joining agent already runs, if there are any."""
        policy = self._policy
        assert policy is not None
        self._follow_hosts(policy, time.monotonic())
        policy.takeover.add_host(host, hello)
        self._agents.save_job_state(policy.takeover.job_state())

    def _give_up(self, why: str) -> None:
        if not self.shutdown.started:
            goes_on = self._policy is not None and self._table.members
            self._stop = why if goes_on else f"the job did not start: {why}"
            self._end_after_failure()

    def _end_after_failure(self) -> None:
        # While the job has no members, no rank is connected to the coordinator. So no
        # rank can report an error, and waiting for reports would be useless.
        self.shutdown.start(AFTER_FAILURE, None if self._table.members else 0.0)

    def _take_decisions(self) -> None:
        """Handles the coordinator's events, before exits are handled."""
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
                # If a rank of a static job has reported an error, show that error.
                if self._policy is not None or not self._table.with_report():
                    self._give_up(text)
            case [_, int(number), *text]:
                now, why = time.monotonic(), "".join(text)
                worker = self._table.record_event(event, number, why, now)
                if self._policy is not None:
                    self._policy.handle_event(event, worker, why, now)

    def _start_epoch(self, kind: str, members: dict[int, int]) -> None:
        table, policy = self._table, self._policy
        gone = table.members.keys() - members.keys()
        again = bool(table.members)
        if again and kind == "start" and policy is not None:
            self.console.note(
                "the last rank is lost: newcomers begin afresh, or from a checkpoint "
                "if the program keeps one"
            )
        new = table.start_epoch(members, time.monotonic())
        lost = sum(not table.workers[number].dismissed for number in gone)
        self._monitor.members_changed([*members], len(new) if again else 0, lost)
        self.console.ranks.update(members)
        for worker in new if again else ():
            self.console.note(table.describe_join(worker, place=table.several_hosts()))
        if policy is None:
            return
        policy.slots.grow()
        limit = policy.settings.reset_limit
        if limit is not None and table.resets > limit:
            changed = f"the members have changed {table.resets} times"
            self._give_up(f"{changed}; the reset limit is {limit}")

    # -- events of processes, from the agents: see `ProcessObserver` -------------------

    def started(self, number: int, pid: int) -> None:
        worker = self._table.workers[number]
        worker.pid = pid
        if self._spec.verbose:
            kind = "rank" if self._policy is None else "worker"
            where = worker.slot.host
            self.console.note(f"{kind} {number}: process {pid} on {where}")

    def wrote(self, number: int, stream: str, data: bytes) -> None:
        if stream == "result":
            self._results.setdefault(number, bytearray()).extend(data)
            return
        if not data and number >= 0:  # clients (ssh, srun) have negative numbers
            self._table.workers[number].streams.discard(stream)
        self.console.write(number, stream, data)

    def exited(self, number: int, code: int, text: str) -> None:
        worker, now = self._table.workers[number], time.monotonic()
        self._monitor.rank_ended(number, worker.kind_of_end(code))
        if not worker.is_running:
            return
        if self._policy is not None:
            self._policy.handle_exit(worker, code, text, now)
            return
        self._table.record_end(worker, code, text, now)
        if not code and self._coordinator is not None:
            # Other ranks may wait for this rank. Without this report to the
            # coordinator, they would wait for the whole failure timeout.
            self._coordinator.process_ended(number, "ended without an error")

    def host_lost(self, numbers: Sequence[int], text: str) -> None:
        for number in numbers:
            self._table.workers[number].end_confirmed = False
            self.exited(number, 255, text)

    # -- the end of the job ------------------------------------------------------------

    def _end(self) -> None:
        """Makes agents kill all processes, reads the last output, closes all files."""
        limit = 2.0 if self.shutdown.signalled is None else 0.3
        if self._discovery is not None:
            self._discovery.close()
        if self._detaching and not self.shutdown.started:
            self._agents.detach_joined()
        self._table.stopping = True
        self._agents.end(limit)
        self._take_decisions()
        if self._coordinator is not None:
            self._coordinator.close()
        self._monitor.close()
        self._agents.close(limit, self._outcome().exit_code)
        self.console.close()

    def _outcome(self) -> JobOutcome:
        if (number := self.shutdown.signalled) is not None:
            name = signal.Signals(number).name
            # After SIGPIPE nobody reads the output of ringrun, so print no reason.
            why = "" if name == "SIGPIPE" else f"ended by {name}"
            return JobOutcome(128 + number, reason=why)
        if self._detaching:
            why = "ended by SIGTERM; the job goes on, and waits for another ringrun"
            return JobOutcome(128 + signal.SIGTERM, reason=why)
        blobs = {number: bytes(data) for number, data in self._results.items()}
        return self._table.outcome(blobs, self._stop, bool(self._leave))
