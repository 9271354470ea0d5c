"""The rules that decide the members of a job: a state machine, no clock, no I/O.

Events come in as calls with the time of day; what is to be sent and told comes out of
`take`. One authority decides, so members can only go on through it, and a worker that
was declared lost is fenced: it never comes back under its number.

    assembly -- all are here --> run -- loss, or wish to restart --> revoked
    revoked -- all have reported --> run (repair or restart), or with too few: waiting
    run -- all members pause --> run (resize), or with too few: waiting
    waiting -- newcomers are ready --> run

A job that stops at its first loss (`on_loss`) is always in assembly: the others are
told of losses, and ranks that have left may come together again as another epoch.

What each message holds is written down in client.py, the other end. How a job comes
together is in assembly.py, what is known of an epoch in epoch_state.py, what reports
mean in commit_decision.py; sockets are in coordinator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax.membership import assembly, commit_decision
from ringjax.membership.assembly import Assembly, MembershipConfig
from ringjax.membership.epoch_state import EpochState
from ringjax.membership.epochs import FINISHED, Epochs, WorkerInfo
from ringjax.membership.outbox import LauncherEvent, OutgoingMessage


class JobMembership(Epochs):
    """Decides who belongs to a job.

    Args:
        rules: its numbers.
        resume: the job had begun under an earlier coordinator.

    Attributes:
        phase: "assembly", "run", "revoked", "waiting" or "stopped".
        epoch: the present one.

    Example:
        >>> job = JobMembership(MembershipConfig(np=2, min_np=1, max_np=2))
        >>> for worker in (0, 1):
        ...     job.hello(worker, "127.0.0.1", {}, None, now=0.0)
        >>> job.closed(1, "it died", now=1.0)
        >>> job.said(0, {"type": "report", "epoch": 0}, now=1.1)
        >>> [news for news in job.take()[1] if news[0] == "members"]
        [('members', 0, 'start', {0: 0, 1: 1}), ('members', 1, 'repair', {0: 0})]
    """

    def __init__(self, rules: MembershipConfig, resume: bool = False) -> None:
        super().__init__(rules)
        self._here: set[int] = set()  # workers that are connected
        self._asked = False  # somebody was told who is missing
        self._ending: dict[int, tuple[str, float]] = {}  # process ended: why, limit
        self._assembly = Assembly(rules, resume)

    def take(self) -> tuple[list[OutgoingMessage], list[LauncherEvent]]:
        """What is to be sent, in order, and what the launcher is to be told."""
        return self._outbox.take()

    def deadline(self) -> float | None:
        """When `tick` has something to do if nothing else happens before."""
        limits: list[float | None] = [limit for _, limit in self._ending.values()]
        limits.append(self.epoch.tell_at(self._rules.pause))
        if self.phase == "assembly":
            limits.append(self._assembly.deadline)
        elif self.phase != "revoked" or self.epoch.unreported():
            limits.append(self._deadline)
        if self.phase == "revoked":
            rules = self._rules
            limits.append(self.epoch.wait_for(rules.silence, rules.doubt))
        return min((limit for limit in limits if limit is not None), default=None)

    # --- what happens ---

    def expected(self, worker: int) -> None:
        """A process was started as this worker."""
        self._assembly.expect(worker)

    def hello(
        self,
        worker: int,
        seen: str,
        hello: dict[str, Any],
        rejoin: Mapping[str, Any] | None,
        now: float,
    ) -> None:
        """A worker has connected, and has no other connection.

        Args:
            rejoin: what a worker knows that had been greeted before.

        Raises:
            ValueError: `rejoin` is no such thing.
        """
        memory = None if rejoin is None else assembly.read(rejoin)
        member = memory is not None and memory.epoch >= 0
        person, outbox = WorkerInfo(seen, hello), self._outbox
        if self._rules.stops:
            self._come(worker, person, now)
        elif worker in outbox.out:
            outbox.fence(worker, outbox.out[worker])
        elif self.phase == "stopped" and not self._left:
            outbox.send(worker, {"type": "stopped", "text": self._end}, last=True)
        elif worker in self._left:
            outbox.send(worker, {"type": "farewell"}, last=True)
        elif worker in outbox.dismissed or (self._left and not member):
            outbox.dismiss(worker, "the job is about to finish")
        elif self.phase == "assembly":
            self._here.add(worker)
            (self._people if member else self._newcomers)[worker] = person
            self._assembly.arrive(worker, memory, now)
            self._assemble(now)
        elif member:
            outbox.fence(worker, "the others went on before it came back")
        elif why := assembly.misfit(hello, self._reference()):
            outbox.send(worker, {"type": "refused", "text": why}, last=True)
        else:
            self._here.add(worker)
            self._newcomers[worker] = person
            self._welcome(worker)

    def _come(self, rank: int, person: WorkerInfo, now: float) -> None:
        """A rank of a job that stops at its first loss has come, perhaps again."""
        size = person.hello.get("size")
        if size != self._rules.np:
            why = f"the job has {self._rules.np} ranks, not {size}"
            self._outbox.send(rank, {"type": "refused", "text": why}, last=True)
            return
        self._outbox.out.pop(rank, None)
        self._here.add(rank)
        self._newcomers[rank] = person
        self._assembly.arrive(rank, None, now)
        self._assemble(now)

    def second(self, worker: int) -> str:
        """Why its second connection is refused; "": it takes the place of the first."""
        if not self._rules.stops or worker not in self._newcomers:
            return ""
        return f"rank {worker} has joined already, from {self._newcomers[worker].seen}"

    def said(self, worker: int, message: Mapping[str, Any], now: float) -> None:
        """A worker that has said hello says something else.

        Raises:
            ValueError: it makes no sense.
        """
        kind, epoch = message.get("type"), self.epoch
        if kind == "failure":
            text = str(message.get("text", ""))
            self._outbox.report("failure", worker, text)
            self._failed.add(worker)
            self._newcomers.pop(worker, None)
            self._lose_member(worker, f"failed: {text}", now)
            self._dissolve(worker, f"failed: {text}", now)
        elif kind == "missing" and self.phase == "assembly":
            # One rank tells people; of the others nobody has to.
            asked, self._asked = self._asked, True
            text = "" if asked else self._assembly.missing()
            self._outbox.send(worker, {"type": "missing", "text": text})
        elif kind == "ready" and worker in self._newcomers:
            self._newcomers[worker].ready = True
            self._outbox.report("ready", worker)
            self._admit(now)
        elif worker not in epoch.alive:
            return  # it was lost meanwhile, and will hear so
        elif kind == "leaving":
            epoch.leavers |= epoch.alive.intersection(self._rules.mates(worker))
            self._announce()
            self._leave_while_waiting()
        elif kind == "leave":
            last = commit_decision.read(message)
            self._leave(
                worker, last if message.get("epoch") == epoch.number else None, now
            )
            self._ending.pop(worker, None)
        elif message.get("epoch") == epoch.number:
            if kind == "pause" and self.phase == "run":
                epoch.pauses[worker] = commit_decision.read(message)
                self._resize_if_all_paused(now)
            elif self.phase in ("run", "revoked"):
                self._stir(worker, str(kind), message, now)

    def _stir(
        self, worker: int, kind: str, message: Mapping[str, Any], now: float
    ) -> None:
        """What ends the epoch, or helps to end it."""
        epoch = self.epoch
        if kind == "report":
            report = epoch.reports[worker] = commit_decision.read(message)
            if self.phase == "run" or (report.restart and not epoch.restart):
                self._revoke(now, report.restart)
            self._conclude(now)
        elif kind == "restart":
            if not epoch.restart:
                self._revoke(now, restart=True)
        elif kind == "suspect":
            rank = message.get("rank")
            if not isinstance(rank, int) or not 0 <= rank < len(epoch.order):
                raise ValueError(f"suspects rank {rank!r} of {len(epoch.order)}")
            accused, text = epoch.order[rank], str(message.get("text", ""))
            if accused in self._left:
                self._revoke(now)  # its place is empty: the others go on without it
            elif accused in epoch.alive and accused != worker:
                epoch.accuse(worker, accused, text, now)
                if self.phase == "run":
                    self._revoke(now)

    def closed(self, worker: int, why: str, now: float) -> None:
        """A worker's only connection has ended."""
        self._here.discard(worker)
        ended = worker in self._ending
        if ended:
            why = self._ending.pop(worker)[0]
            self._outbox.out.setdefault(worker, why)
        else:
            why = f"lost its connection to the coordinator ({why})"
        if self.phase == "assembly":
            self._assembly.leave(worker)
            self._people.pop(worker, None)
        if self._newcomers.pop(worker, None) is None:
            self._lose_member(worker, why, now)
        if ended:
            self._dissolve(worker, why, now)

    def _dissolve(self, worker: int, why: str, now: float) -> None:
        """A worker's process has ended; what becomes of a group that is no member."""
        if worker in self._left or worker in self._outbox.dismissed:
            return
        if self.phase != "assembly":
            self._end_group(worker, why)
        elif self._assembly.resuming:  # it is not known yet which workers have finished
            self._assembly.never(worker, why)
            self._assemble(now)
        else:
            self._end_group(worker, why)
            for mate in self._rules.mates(worker):
                self._assembly.never(mate, why)
            self._assemble(now)

    def process_ended(
        self, worker: int, text: str, now: float, *, heirs: bool = True
    ) -> None:
        """A worker's process has ended; its number is not used again.

        What it sent before may still be on its way: that it has finished, for example.
        So the end of its connection is waited for, a moment.

        Args:
            heirs: newcomers may begin afresh when the last member has ended so. Not if
                it is only out of reach with its host, as it may go on there, and not
                after an error of the program, which would come again.
        """
        if heirs and worker not in self._failed:
            self._ended.add(worker)
        if worker in self._here:
            self._ending.setdefault(worker, (text, now + self._rules.moment))
        elif worker not in self._left and worker not in self._outbox.dismissed:
            self._outbox.out.setdefault(worker, text)
            self._lose_member(worker, text, now)
            self._dissolve(worker, text, now)
        if self.phase == "waiting":
            self._admit(now)

    def finished(self, worker: int, now: float) -> None:
        """A launcher remembers what an earlier coordinator was told by a worker."""
        self._left.add(worker)
        self._assembly.never(worker, FINISHED)
        if self.phase == "assembly":
            self._assemble(now)

    def admission(self, max_np: int, now: float) -> None:
        """Changes the most members there may be; nobody is sent away for it."""
        self._max_np = max_np
        self._admit(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for worker, (text, limit) in list(self._ending.items()):
            if now >= limit:
                self.closed(worker, text, now)
        self._tell_gone(now)
        if self.phase == "assembly":
            self._assemble(now)
            return
        rules = self._rules
        late = self._deadline is not None and now >= self._deadline
        if self.phase == "revoked":
            silent = self.epoch.silent(now, rules.silence)
            if late:
                text = f"did not report within {rules.failure_timeout:g} s"
                silent |= dict.fromkeys(self.epoch.unreported(), text)
            if silent:
                self._lose(silent, now)
            self._conclude(now)
        elif not late:
            return
        elif self.phase == "waiting":
            limit = rules.elastic_timeout
            self._stop(f"{self._shortage()}, and no more came within {limit:g} s")

    # --- coming together ---

    def _reference(self) -> dict[str, Any]:
        """The hello of a member; those of all are alike in what matters."""
        return next((person.hello for person in self._people.values()), {})

    def _assemble(self, now: float) -> None:
        outcome = self._assembly.outcome(now)
        if isinstance(outcome, assembly.StartJob):
            self._form("start", outcome.workers)
        elif isinstance(outcome, assembly.ResumeJob):
            self._resume(outcome, now)
        elif isinstance(outcome, assembly.FailJob) and not self._rules.stops:
            self._stop(outcome.text)
        elif isinstance(outcome, assembly.FailJob):
            self._outbox.report("stop", outcome.text)
            for rank in self._newcomers:
                refusal = {"type": "refused", "text": outcome.text}
                self._outbox.send(rank, refusal, last=True)
            self._newcomers.clear()
        if outcome is not None and self._rules.stops:  # they may try again
            self.phase, self._assembly = "assembly", Assembly(self._rules)
            self._asked = False

    def _resume(self, found: assembly.ResumeJob, now: float) -> None:
        """Goes on as what the members know."""
        memory = found.memory
        self.phase, self._deadline = "run", None
        self._term = found.term
        epoch = self.epoch = EpochState(memory.epoch, memory.order)
        resumed = {"type": "resumed", "epoch": epoch.number, "term": self._term}
        self._outbox.tell(found.missed, dict(memory.members))
        self._outbox.tell((*found.missed, *found.know), resumed)
        for worker in found.others:
            del self._people[worker]
            self._outbox.fence(worker, "the others went on without it")
        for worker in self._newcomers:
            self._welcome(worker)
        self._tell_members("resume")
        text = "did not come back to the coordinator"
        missing = [w for w in epoch.order if w not in {*found.know, *found.missed}]
        self._left |= found.finished.keys()
        for worker in self._left.intersection(missing):
            epoch.remove(worker, FINISHED, found.finished.get(worker))
            missing.remove(worker)
        for worker, why in list(self._outbox.out.items()):
            if worker not in epoch.order:
                self._end_group(worker, why)
        if missing:
            self._lose({w: self._outbox.out.get(w, text) for w in missing}, now)
        self._announce()
