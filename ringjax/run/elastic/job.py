"""One job whose ranks come and go: what dies is replaced, the others go on.

Its coordinator (coordinator.py) decides who is a member; here processes are started and
ended, seats are filled (seats.py), hosts are found (hosts/discovery.py), and sentences
are said (workers.py). The loop is as that of a job of fixed size, static_job.py.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringjax.run.elastic.adoption import Adoption
from ringjax.run.elastic.bounds import Elastic
from ringjax.run.elastic.coordinator_process import CoordinatorProcess
from ringjax.run.elastic.replacement import Keeper
from ringjax.run.elastic.seats import Seating
from ringjax.run.elastic.workers import Roster, Worker
from ringjax.run.ending import AFTER_FAILURE, TO_LEAVE, Ending
from ringjax.run.hosts.blacklist import Blacklist
from ringjax.run.hosts.channel import Message
from ringjax.run.hosts.discovery import Discovery
from ringjax.run.hosts.fleet import Fleet
from ringjax.run.hosts.host_command import Spec
from ringjax.run.hosts.slots import ANY, Host
from ringjax.run.monitor.hub import Hub
from ringjax.run.output import Console
from ringjax.run.static_job import SOON, Outcome, interrupted

if TYPE_CHECKING:
    from ringjax.run.hosts.arrivals import Arrivals

_TICK = 0.1  # seconds between two looks at the clock
_GATHERING = 2.0  # seconds for agents with ranks of a job that had begun


class ElasticJob:
    """A running elastic job. `run` starts it, returns when nothing of it is left.

    Args:
        spec: what to run; its slots are not looked at.
        elastic: where, and how many.
        console: shows the output.
        elastic_timeout: seconds to wait for hosts, or for workers if they are too few.
        failure_timeout: seconds of silence until a member is lost.
        coordinator: makes the coordinator, a `CoordinatorProcess`.

    Attributes:
        size: 0, as nobody knows how many ranks there are at the end.
        console: shows the output.
        hub: knows how the ranks are.
    """

    size = 0

    def __init__(
        self,
        spec: Spec,
        elastic: Elastic,
        console: Console,
        *,
        elastic_timeout: float = 600.0,
        failure_timeout: float = 5.0,
        coordinator: Callable[..., Any] = CoordinatorProcess,
    ) -> None:
        self._spec = spec
        self._elastic = elastic
        self.console = console
        self._timeout, self._failure_timeout = elastic_timeout, failure_timeout
        self._make_coordinator = coordinator
        self._coordinator: CoordinatorProcess | None = None
        self._fleet = Fleet(spec, console, self)
        self.hub = Hub(self._fleet, console, spec, elastic=True)
        self._ending = Ending(TO_LEAVE)
        blacklist = Blacklist(elastic.cooldown) if elastic.blacklists else None
        self._seating = Seating(
            (),
            first=elastic.np or elastic.max_np,
            most=elastic.max_np,
            least=elastic.min_np,
            blacklist=blacklist,
            group=elastic.group,
        )
        self._roster = Roster(elastic.min_np, console.last_error, elastic.group)
        self._keeper = Keeper(
            self._roster,
            self._seating,
            blacklist,
            self._fleet,
            console.note,
            console.remove,
        )
        self._hosts: Sequence[Host] = elastic.hosts or ()
        self._adoption = Adoption(self._roster, self._seating, self._fleet, console)
        self._discovery: Discovery | Arrivals | None = None
        if elastic.script:
            self._discovery = Discovery(
                elastic.script, elastic.slots, self._fleet, console.note
            )
        self._shared: dict[str, str] = {}
        self._results: dict[int, bytearray] = {}
        self._short_since = math.inf
        self._stop = self._leave = ""
        self._handing = False

    def run(self) -> Outcome:
        """Start everything, wait for the end, leave nothing behind."""
        self.hub.begin()
        try:
            self._fleet.start()
            self._listen()
            self._seating.update(self._hosts)
            self._wait_for_hosts()
            if not self._ending.begun:
                self._start_coordinator()
            while not (self._is_over() or self._ending.given_up):
                self._turn()
        finally:
            self._end()
        return self._outcome()

    def interrupt(self, number: int) -> None:
        """End the job because ringrun got a signal; a second one ends it at once."""
        self._ending.interrupt(number)

    def hand_on(self, number: int) -> None:
        """Soon asks all workers to leave: for them the signal would be the end."""
        self._leave = signal.Signals(number).name

    def patience(self) -> float | None:
        """See `Ending.patience`."""
        return self._ending.patience

    def hand_over(self) -> bool:
        """SIGTERM: whether the job goes on without this ringrun, on hosts that came.

        Its own workers leave at their next commit. Asked again, by a second signal, it
        is not so, and the job ends.
        """
        if self._coordinator is None or self._ending.begun or self._handing:
            return False
        self._handing = len(self._own()) < len(self._roster.running())
        return self._handing

    def _own(self) -> list[Worker]:
        """Those that run on hosts that have not come by themselves."""
        workers = self._roster.running()
        return [w for w in workers if not self._fleet.has_come(w.seat.host)]

    def _is_over(self) -> bool:
        if self._ending.begun:
            return not self._roster.running()
        return not self._own() if self._handing else self._keeper.over()

    # Starting.

    def _listen(self) -> None:
        """Takes in agents, if they come by themselves."""
        if self._spec.listening is None:
            return
        from ringjax.run.hosts.arrivals import Arrivals  # costs others nothing

        self._discovery = Arrivals(
            self._spec,
            self._fleet,
            self.console.note,
            self._came,
            self._adoption.job_for,
        )

    def _wait_for_hosts(self) -> None:
        """Until there is room for enough workers, or ranks of the job have come."""
        begun, noted = time.monotonic(), False
        while self._discovery is not None and not self._ending.begun:
            count, needed = len(self._seating.seats), self._elastic.min_np
            waited = time.monotonic() - begun
            settled = self._spec.listening is None or waited > _GATHERING
            if self._spec.listening is not None and waited < self._spec.start_timeout:
                needed = self._elastic.np or needed
            if self._adoption.resumes:
                return
            name, why = self._discovery.name, self._discovery.trouble
            found = f"{name} found {count} of at least {needed} slots in"
            if self._discovery.hopeless:
                self._give_up(f"{name} {self._elastic.script}: {why}")
            elif self._discovery.hosts is not None and count >= needed and settled:
                return
            elif waited > self._timeout:
                self._give_up(f"{found} {self._timeout:g} s" + f", {why}" * bool(why))
            elif waited > SOON and not noted:
                noted = True
                self.console.note(f"{found} {SOON:g} s; waits for more")
            else:
                self._turn()

    def _start_coordinator(self) -> None:
        elastic, spec = self._elastic, self._spec
        hosts = dict.fromkeys(host.name for host in self._hosts)
        remote = self._fleet.remote(hosts) if self._discovery is None else [ANY]
        secret, where = spec.rendezvous(remote)
        job = self._adoption.job = self._adoption.job or secrets.token_hex(8)
        count = self._elastic.whole(len(self._seating.seats))
        self._coordinator = self._make_coordinator(
            secret,
            job,
            np=count,
            **elastic.rules,
            start_timeout=spec.start_timeout,
            elastic_timeout=self._timeout,
            failure_timeout=self._failure_timeout,
            tls=spec.tls,
            note=self.console.note,
            resume=self._adoption.resumes,
            **where,
        )
        self._coordinator.start()
        self._adoption.introduce(self._coordinator)
        self._seating.closed = self._adoption.done
        self._keeper.coordinator = self._coordinator
        self._fleet.selector.register(
            self._coordinator.wakeup, selectors.EVENT_READ, lambda: None
        )
        self._shared = {
            "RINGJAX_RENDEZVOUS": ",".join(self._coordinator.addresses),
            "RINGJAX_SECRET": secret.hex(),
            "RINGJAX_JOB": job,
            "RINGJAX_ELASTIC": "1",
            "RINGJAX_SPREAD": str(int(len(hosts) > 1 or spec.listening is not None)),
        }
        if spec.verbose:
            self.console.note(
                f"job {job}: {count} ranks ({elastic.min_np} to {elastic.max_np}), "
                f"rendezvous at {self._shared['RINGJAX_RENDEZVOUS']}"
            )

    def _start_workers(self, now: float) -> None:
        """Fill the seats that are to be taken now."""
        if self._ending.begun or self._handing or self._coordinator is None:
            return
        started = []
        for seat in self._seating.vacant(self._roster.counting(), now):
            worker = self._roster.add(seat)
            self.console.add(worker.number, seat.number)
            self._coordinator.expected(worker.number)
            started.append(worker)
        if started:
            self._fleet.remember(self._adoption.memory())
        for host in dict.fromkeys(worker.seat.host for worker in started):
            orders = [self._order(w) for w in started if w.seat.host == host]
            self._fleet.spawn(host, orders, self._spec.env, self._spec.payload)

    def _order(self, worker: Worker) -> dict[str, Any]:
        slot = self._seating.slot(worker.seat, lambda seat: seat.worker is not None)
        number, argv = worker.number, list(self._spec.command)
        env = {**slot.environment(), **self._shared, "RINGJAX_WORKER": str(number)}
        return {"id": number, "argv": argv, "env": env, "takes_group": True}

    # While it runs.

    def _turn(self) -> None:
        """One round of the loop: events, the coordinator, the clock, the plan."""
        if not self._fleet.turn(self._ending.timeout(_TICK), self._ask_coordinator):
            self.console.idle()
        now = time.monotonic()
        self.hub.tick(now)
        self._keeper.silent = self._ending.begun
        self._keeper.tick(now)
        if not self._ending.begun:
            if self._coordinator is not None:
                self._coordinator.tick(now)
            self._discover(now)
            self._start_workers(now)
            self._check_number(now)
        self._leave = self._leave or self._fleet.asked_back
        if self._leave and not (self._seating.closed or self._ending.begun):
            self._keeper.dismiss_all(self._leave)
        asked = bool(self._leave) or self._ending.signalled == signal.SIGTERM
        for number in self._ending.due():
            self._keeper.signal(number, asked=asked)

    def _give_up(self, why: str) -> None:
        """The job cannot go on."""
        if not self._ending.begun:
            started = "" if self._roster.members else "the job did not start: "
            self._stop = started + why
            self._ending.begin(AFTER_FAILURE, None if self._roster.members else 0.0)

    def _ask_coordinator(self) -> None:
        """Take what it decided, before who ended."""
        if self._coordinator is None:
            return
        self._coordinator.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._decided(*self._coordinator.events.get_nowait())

    def _decided(self, event: str, *details: Any) -> None:
        known = self._roster.known
        match event, *details:
            case ["members", _, kind, members]:
                if kind == "start" and self._roster.members:
                    self.console.note(
                        "the last rank is lost: newcomers begin afresh, or from a "
                        "checkpoint if the program keeps one"
                    )
                self._entered(members)
            case ["ready", number]:
                known(number).ready = True
            case ["fenced", number, why]:
                self._keeper.fence(known(number), why, time.monotonic())
            case ["failure", number, text]:
                worker = known(number)
                worker.report = worker.report or text
                # Also one that is no member yet: its seat is wanted if it stays.
                self._keeper.fence(worker, f"failed: {text}", time.monotonic())
            case ["finished", number]:
                known(number).finished = True
                self._seating.closed = True
            case ["dismissed", number, _]:
                known(number).dismissed = True
            case ["ended", number]:
                known(number).answered = True
            case ["waiting", text]:
                if self._roster.present():
                    self.console.note(text)
            case ["stop", text]:
                self._give_up(text)

    def _entered(self, members: dict[int, int]) -> None:
        """An epoch has begun."""
        roster = self._roster
        first, gone = not roster.members, roster.members.keys() - members.keys()
        new = roster.enter(members, time.monotonic())
        self.hub.changed(0 if first else len(new), sum(map(roster.is_lost, gone)))
        self._seating.grow()
        self.console.ranks.update(members)
        if not first:
            ranks = "1 rank" if len(members) == 1 else f"{len(members)} ranks"
            for worker in new:
                where = f" on {worker.seat.host}" if roster.several_hosts() else ""
                self.console.note(
                    f"worker {worker.number}{where} joined as rank {worker.rank}; "
                    + ranks
                )
        limit = self._elastic.reset_limit
        if limit is not None and roster.resets > limit:
            self._give_up(
                f"the members have changed {roster.resets} times; the reset limit is "
                f"{limit}"
            )

    def _discover(self, now: float) -> None:
        """Follow the hosts: who has no seat any more is asked to leave."""
        if self._discovery is None:
            return
        self._discovery.tick(now)
        self._follow(now)

    def _follow(self, now: float) -> None:
        assert self._discovery is not None
        if self._handing:
            self._discovery.without_own()
        hosts = self._discovery.hosts
        if hosts is None or hosts == self._hosts:
            return
        self._hosts = hosts
        for number in self._seating.update(hosts):
            if self._roster.workers[number].runs:
                self._keeper.dismiss(number, now)

    def _came(self, host: str, hello: Message) -> None:
        """The agent of a host has come by itself, perhaps with ranks."""
        self._follow(time.monotonic())
        self._adoption.take(host, hello)
        self._fleet.remember(self._adoption.memory())

    def _check_number(self, now: float) -> None:
        """Too few workers and nobody to be started: not for ever."""
        count = self._roster.counting()
        if self._seating.closed or count >= self._elastic.min_np:
            self._short_since = math.inf
            return
        self._short_since = min(self._short_since, now)
        # The coordinator, which knows more, has the first word.
        if now - self._short_since > self._timeout + 1.0:
            self._give_up(
                f"{count} of at least {self._elastic.min_np} workers are left, and "
                f"there was no place for others in {self._timeout:g} s"
            )

    # What the fleet reports.

    def started(self, name: int, pid: int) -> None:
        """Notes the process."""
        worker = self._roster.workers[name]
        worker.pid = pid
        if self._spec.verbose:
            self.console.note(f"worker {name}: process {pid} on {worker.seat.host}")

    def wrote(self, name: int, stream: str, data: bytes) -> None:
        """Shows it, or keeps it if it is a result."""
        if stream == "result":
            self._results.setdefault(name, bytearray()).extend(data)
            return
        if not data and name >= 0:  # else it is an agent's client
            self._roster.workers[name].streams.discard(stream)
        self.console.write(name, stream, data)

    def exited(self, name: int, code: int, text: str) -> None:
        """Notes that a worker has ended; the coordinator hears of it at once."""
        worker = self._roster.workers[name]
        self.hub.ended(name)
        if worker.exit_code is None:
            self._keeper.ended(worker, code, text, time.monotonic())

    def host_lost(self, names: Sequence[int], text: str) -> None:
        """Notes that the workers of a host are lost."""
        for name in names:
            self._roster.workers[name].certain = False
            self.exited(name, 255, text)

    # The end.

    def _end(self) -> None:
        """Have every agent kill what is left, read the last output, close."""
        limit = 2.0 if self._ending.signalled is None else 0.3
        if self._discovery is not None:
            self._discovery.close()
        if self._handing and not self._ending.begun:
            self._fleet.let_go()
        self._fleet.end(limit)
        if self._coordinator is not None:
            self._ask_coordinator()
            self._coordinator.close()
        self.hub.close()
        self._fleet.close(limit, self._outcome().exit_code)
        self.console.close()

    def _outcome(self) -> Outcome:
        blobs = {number: bytes(data) for number, data in self._results.items()}
        if self._ending.signalled is not None:
            return interrupted(self._ending.signalled, blobs)
        if self._handing:
            why = "ended by SIGTERM; the job goes on, and waits for another ringrun"
            return Outcome(128 + signal.SIGTERM, reason=why)
        return self._roster.outcome(blobs, self._stop, bool(self._leave))
