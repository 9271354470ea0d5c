"""One job of a fixed number of ranks: its coordinator, its verdict, its end.

A single loop reads what the agents report and decides when the job is over. When a rank
fails the others are given a second to fail with a clear error of their own, then
SIGTERM, then SIGKILL. Starts no rank itself: that is hosts/agent.py, one on each host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringjax.run.ending import AFTER_FAILURE, Ending
from ringjax.run.hosts.fleet import Fleet
from ringjax.run.hosts.host_command import Spec
from ringjax.run.hosts.slots import Slot, assign, in_order
from ringjax.run.monitor.hub import Hub
from ringjax.run.output import Console
from ringjax.run.verdict import Verdict

if TYPE_CHECKING:
    from ringjax.membership.coordinator import Coordinator
    from ringjax.run.hosts.arrivals import Arrivals

SOON = 10.0  # seconds until it is said what is waited for
_TICK = 0.1  # seconds between two looks at the clock
_TO_END = 10.0  # seconds for a rank that has told that it fails


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        rank: the one to blame, -1 if there is none.
        left: nobody is, the ranks left because the place is wanted for something else.
    """

    exit_code: int
    rank: int = -1
    reason: str = ""
    results: dict[int, bytes] = field(default_factory=dict)
    left: bool = False


def interrupted(number: int, results: dict[int, bytes]) -> Outcome:
    """The outcome of a job that ended because ringrun got a signal."""
    name = signal.Signals(number).name
    # As if SIGPIPE had ended us: nobody wants to know any more.
    reason = "" if name == "SIGPIPE" else f"ended by {name}"
    return Outcome(128 + number, reason=reason, results=results)


class Job:
    """A running job. `run` starts it, returns when nothing of it is left.

    Args:
        size: number of its ranks, if their hosts have yet to come by themselves.

    Attributes:
        size: number of its ranks.
        console: shows their output.
        hub: knows how they are.
    """

    def __init__(self, spec: Spec, console: Console, size: int = 0) -> None:
        self._spec = spec
        self.console = console
        self.size = size or len(spec.slots)
        self._fleet = Fleet(spec, console, self)
        self.hub = Hub(self._fleet, console, spec, elastic=False)
        self._ending = Ending()
        self._place(spec.slots)
        self._arrivals: Arrivals | None = None
        self._results: dict[int, bytearray] = {}
        self._coordinator: Coordinator | None = None
        self._met = False  # all ranks have been in ringjax.init() together
        self._start_failure = ""
        self._handed_on: list[int] = []

    def run(self) -> Outcome:
        """Start everything, wait for the end, leave nothing behind."""
        self.hub.begin()
        try:
            self._fleet.start()
            self._wait_for_hosts()
            if not self._ending.begun:
                self._start_ranks()
                while not (self._verdict.over or self._ending.given_up):
                    self._turn()
        finally:
            self._end()
        return self._outcome()

    def interrupt(self, number: int) -> None:
        """End the job because ringrun got a signal; a second one ends it at once."""
        self._ending.interrupt(number)

    def hand_on(self, number: int) -> None:
        """Soon sends the ranks a signal that ringrun got."""
        self._handed_on.append(number)

    def patience(self) -> float | None:
        """See `Ending.patience`."""
        return self._ending.patience

    def hand_over(self) -> bool:
        """Whether the job goes on without this ringrun: it does not."""
        return False

    # Starting.

    def _place(self, slots: Sequence[Slot]) -> None:
        self._spec = dataclasses.replace(self._spec, slots=slots)
        hosts = [slot.host for slot in slots]
        self._verdict = Verdict(hosts, self.console.last_error)

    def _wait_for_hosts(self) -> None:
        """Until there is room for all ranks, if hosts come by themselves."""
        listening = self._spec.listening
        if listening is None:
            return
        from ringjax.run.hosts.arrivals import Arrivals  # costs others nothing

        arrivals = self._arrivals = Arrivals(self._spec, self._fleet, self.console.note)
        begun, noted = time.monotonic(), False
        while (count := sum(host.slots for host in arrivals.hosts)) < self.size:
            if self._ending.begun:
                return
            waited = time.monotonic() - begun
            found = f"--listen found {count} of {self.size} slots in"
            if waited > listening.patience:
                self._no_start(f"{found} {listening.patience:g} s")
                return
            if waited > SOON and not noted:
                noted = True
                self.console.note(f"{found} {SOON:g} s; waits for more")
            self._turn()
        self._place(assign(sorted(arrivals.hosts, key=in_order), self.size))

    def _start_ranks(self) -> None:
        from ringjax.membership.coordinator import Coordinator

        spec, fleet = self._spec, self._fleet
        job = secrets.token_hex(8)
        hosts = list(dict.fromkeys(slot.host for slot in spec.slots))
        secret, where = spec.rendezvous(fleet.remote(hosts))
        self._coordinator = Coordinator(
            secret,
            job,
            np=self.size,
            on_loss="stop",
            **where,
            start_timeout=spec.start_timeout,
            tls=spec.tls,
        )
        self._coordinator.start()
        fleet.selector.register(
            self._coordinator.wakeup, selectors.EVENT_READ, lambda: None
        )
        shared = {
            "RINGJAX_RENDEZVOUS": ",".join(self._coordinator.addresses),
            "RINGJAX_SECRET": secret.hex(),
            "RINGJAX_JOB": job,
        }
        if spec.verbose:
            self.console.note(
                f"job {job}: {self.size} ranks, rendezvous at "
                + shared["RINGJAX_RENDEZVOUS"]
            )
        for host in hosts:
            orders = [
                {
                    "id": slot.rank,
                    "argv": list(spec.command),
                    "env": {**slot.environment(), **shared},
                }
                for slot in spec.slots
                if slot.host == host
            ]
            if spec.stdin and host == spec.slots[0].host:
                fleet.give_input()
                orders[0]["descriptors"] = 1
            fleet.spawn(host, orders, spec.env, spec.payload)

    # While it runs.

    def _turn(self) -> None:
        """One round of the loop: events, the coordinator, the plan."""
        if not self._fleet.turn(self._ending.timeout(_TICK), self._ask_coordinator):
            self.console.idle()
        self.hub.tick(time.monotonic())
        self._advance()
        while self._handed_on:
            # Not what they have started: that may not know what to do with it.
            ranks = range(self.size)
            self._fleet.signal(self._handed_on.pop(0), ranks, alone=True)

    def _ask_coordinator(self) -> None:
        """Take note of who met and who reported a failure, before who exited."""
        if self._arrivals is not None:
            self._arrivals.tick(time.monotonic())
        if self._coordinator is None:
            return
        self._coordinator.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._decided(*self._coordinator.events.get_nowait())

    def _decided(self, event: str, *details: Any) -> None:
        match event, *details:
            case ["members", *_]:
                self._met = True
            case ["failure", rank, text]:
                self._verdict.reported(rank, text, time.monotonic())
            case ["stop", text] if not self._ending.begun and not self._verdict.told:
                self._no_start(text)

    def _no_start(self, why: str) -> None:
        self._start_failure = f"the job did not start: {why}"
        self._end_after_failure()

    def _advance(self) -> None:
        if not self._ending.begun:
            hangs = self._verdict.hangs(time.monotonic(), _TO_END)
            if hangs is not None:
                self.console.note(
                    f"rank {hangs} has failed, and its process has not ended in "
                    f"{_TO_END:g} s: a thread or an exit handler of it goes on"
                )
            if self._verdict.failed or hangs is not None:
                self._end_after_failure()
        for number in self._ending.due():
            self._verdict.stopping()
            self._fleet.signal(number)

    def _end_after_failure(self) -> None:
        # Ranks that never met have no clear error of their own to wait for.
        self._ending.begin(AFTER_FAILURE, None if self._met else 0.0)

    # What the fleet reports.

    def started(self, name: int, pid: int) -> None:
        """Says so, if asked to."""
        if self._spec.verbose:
            where = self._spec.slots[name].host
            self.console.note(f"rank {name}: process {pid} on {where}")

    def wrote(self, name: int, stream: str, data: bytes) -> None:
        """Shows it, or keeps it if it is a result."""
        if stream == "result":
            self._results.setdefault(name, bytearray()).extend(data)
        else:
            self.console.write(name, stream, data)

    def exited(self, name: int, code: int, text: str) -> None:
        """Notes that a rank has ended."""
        self.hub.ended(name)
        self._verdict.exited(name, code, time.monotonic(), text)
        if not code and self._coordinator is not None:
            # Nobody has to wait for the timeout if others wait for this rank.
            self._coordinator.lost(name, "ended without an error")

    def host_lost(self, names: Sequence[int], text: str) -> None:
        """Notes that the ranks of a host are lost."""
        for name in names:
            self.exited(name, 255, text)

    # The end.

    def _end(self) -> None:
        """Have every agent kill what is left, read the last output, close."""
        limit = 2.0 if self._ending.signalled is None else 0.3
        if self._arrivals is not None:
            self._arrivals.close()
        self._fleet.end(limit)
        self._ask_coordinator()
        if self._coordinator is not None:
            self._coordinator.close()
        self.hub.close()
        self._fleet.close(limit, self._outcome().exit_code)
        self.console.close()

    def _outcome(self) -> Outcome:
        results = {rank: bytes(data) for rank, data in self._results.items()}
        if self._ending.signalled is not None:
            return interrupted(self._ending.signalled, results)
        blame = self._verdict.first()
        if self._start_failure:
            return Outcome(1, reason=self._start_failure, results=results)
        if blame is not None:
            return Outcome(blame.exit_code, blame.rank, blame.reason, results)
        if not self._verdict.over or not self._spec.slots:
            return Outcome(1, reason="the job did not come to its end")
        return Outcome(0, results=results)
