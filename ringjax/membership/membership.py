"""Receives the events of all workers and decides which workers belong to a job.

This file handles the events: hello, message, loss, end of a process, timeout. Its base
class in epochs.py admits newcomers and assigns ranks. The state machine has no clock
and no I/O: events arrive as method calls with the time, and messages to send and events
for the launcher are collected until `drain`. No member can begin an epoch without the
coordinator. A worker that was declared lost is fenced, and its id is never used again.

    assembly -- all workers are here --> run -- loss, or a restart request --> revoked
    revoked -- all have reported --> run (repair or restart), or with too few: waiting
    run -- all members pause --> run (resize), or with too few: waiting
    waiting -- newcomers are ready --> run

A job that stops at its first loss (`on_loss`) stays in assembly: the coordinator
informs the other ranks of each loss, and ranks that left may form another epoch.

client.py describes the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringjax.control.member import JsonObject
from ringjax.control.number_lists import expand
from ringjax.membership import assembly, commit_decision
from ringjax.membership.assembly import Assembly, MembershipConfig
from ringjax.membership.epoch_state import EpochState
from ringjax.membership.epochs import (
    FINISHED,
    Epochs,
    LauncherEvent,
    OutgoingMessage,
    WorkerInfo,
)


class JobMembership(Epochs):
    """Decides which workers belong to a job.

    Pass `resume` as true if the job had begun under an earlier coordinator.

    Example:
        >>> job = JobMembership(MembershipConfig(np=2, min_np=1, max_np=2))
        >>> for worker in (0, 1):
        ...     job.on_hello(worker, "127.0.0.1", {}, None, now=0.0)
        >>> job.on_disconnected(1, "it died", now=1.0)
        >>> job.on_message(0, {"type": "report", "epoch": 0}, now=1.1)
        >>> [event for event in job.drain()[1] if event[0] == "members"]
        [('members', 0, 'start', {0: 0, 1: 1}), ('members', 1, 'repair', {0: 0})]
    """

    def __init__(self, config: MembershipConfig, resume: bool = False) -> None:
        super().__init__(config)
        self._connected: set[int] = set()
        self._missing_was_asked = False  # whether a rank has asked which are missing
        # Workers whose process has ended while the connection is still open, each with
        # the reason and the time until which to wait for the end of the connection.
        self._exited: dict[int, tuple[str, float]] = {}
        self._assembly = Assembly(config, resume)

    def drain(self) -> tuple[list[OutgoingMessage], list[LauncherEvent]]:
        """Removes and returns the messages to send and the events for the launcher."""
        return self._outbox.drain()

    def deadline(self) -> float | None:
        """Returns the latest time to call `tick`, or None if no timeout runs."""
        limits: list[float | None] = [limit for _, limit in self._exited.values()]
        limits.append(self.epoch.announce_at(self._config.departure_interval))
        if self.phase == "assembly":
            limits.append(self._assembly.deadline)
        elif self.phase != "revoked" or not self.epoch.all_reported():
            limits.append(self._deadline)
        if self.phase == "revoked":
            config = self._config
            limits.append(
                self.epoch.accusation_deadline(
                    config.report_timeout, config.arbitration_delay
                )
            )
        return min((limit for limit in limits if limit is not None), default=None)

    # -- events ------------------------------------------------------------------------

    def expect(self, worker: int) -> None:
        """Records that the process of a worker was started."""
        self._assembly.expect(worker)

    def on_hello(
        self,
        worker: int,
        seen: str,
        hello: JsonObject,
        rejoin: Mapping[str, Any] | None,
        now: float,
    ) -> None:
        """Handles the hello of a worker that has no other connection.

        `rejoin` describes the worker's earlier connection, see `RejoinState`. Pass None
        for a first connection. Raises ValueError if `rejoin` is malformed.
        """
        state = None if rejoin is None else assembly.parse_rejoin(rejoin)
        member = state is not None and state.epoch >= 0
        info, outbox = WorkerInfo(seen, hello), self._outbox
        if self._config.stops_on_loss:
            self._add_rank(worker, info, now)
        elif worker in outbox.fenced:
            outbox.fence(worker, outbox.fenced[worker])
        elif self.phase == "stopped" and not self._finished:
            stopped = {"type": "stopped", "text": self._stop_reason}
            outbox.send(worker, stopped, last=True)
        elif worker in self._finished:
            outbox.send(worker, {"type": "farewell"}, last=True)
        elif worker in outbox.dismissed or (self._finished and not member):
            outbox.dismiss(worker, "the job is about to finish")
        elif self.phase == "assembly":
            self._connected.add(worker)
            (self._members if member else self._newcomers)[worker] = info
            self._assembly.arrive(worker, state, now)
            self._assemble(now)
        elif member:
            outbox.fence(worker, "the others went on before it came back")
        elif why := assembly.mismatch(
            hello, f"worker {worker}", self._reference(), "the members"
        ):
            outbox.send(worker, {"type": "refused", "text": why}, last=True)
        else:
            self._connected.add(worker)
            self._newcomers[worker] = info
            self._welcome(worker)

    def _add_rank(self, rank: int, info: WorkerInfo, now: float) -> None:
        """Adds a rank of a job that stops at its first loss."""
        size = info.hello.get("size")
        if size != self._config.np:
            why = f"the job has {self._config.np} ranks, not {size}"
            self._outbox.send(rank, {"type": "refused", "text": why}, last=True)
            return
        self._outbox.fenced.pop(rank, None)
        self._connected.add(rank)
        self._newcomers[rank] = info
        self._assembly.arrive(rank, None, now)
        self._assemble(now)

    def duplicate_refusal(self, worker: int) -> str:
        """Returns why a worker may not connect twice, or "" if it may."""
        if not self._config.stops_on_loss or worker not in self._newcomers:
            return ""
        return f"rank {worker} has joined already, from {self._newcomers[worker].seen}"

    def on_message(self, worker: int, message: Mapping[str, Any], now: float) -> None:
        """Handles a message of a worker that has sent its hello.

        Raises ValueError if the message is malformed.
        """
        kind, epoch = message.get("type"), self.epoch
        if kind == "failure":
            text = str(message.get("text", ""))
            self._outbox.publish("failure", worker, text)
            self._failed.add(worker)
            self._newcomers.pop(worker, None)
            self._lose_if_member(worker, f"failed: {text}", now)
            self._on_exit(worker, f"failed: {text}", now)
        elif kind == "missing" and self.phase == "assembly":
            # Only one rank of the job prints the warning, so only the first rank that
            # requests the missing ranks receives them.
            asked, self._missing_was_asked = self._missing_was_asked, True
            text = "" if asked else self._assembly.missing()
            self._outbox.send(worker, {"type": "missing", "text": text})
        elif kind == "ready" and worker in self._newcomers:
            self._newcomers[worker].ready = True
            cold = "cold" if message.get("cold") is True else ""
            self._outbox.publish("ready", worker, cold)
            self._admit(now)
        elif (
            kind == "leaving" and worker in self._newcomers and self.phase != "assembly"
        ):
            self._dismiss_newcomers(self._config.group_of(worker), "it was asked to")
        elif worker not in epoch.alive:
            return  # the worker is lost, and will receive the message that it is fenced
        elif kind == "leaving":
            epoch.leavers |= epoch.alive.intersection(self._config.group_of(worker))
            self._announce()
            self._leave_while_waiting()
        elif kind == "leave":
            report = commit_decision.parse_report(message)
            last = report if message.get("epoch") == epoch.number else None
            self._finish_member(worker, last, now, str(message.get("error", "")))
            self._exited.pop(worker, None)
        elif message.get("epoch") == epoch.number:
            if kind == "locate":
                self._locate(worker, message)
            elif kind == "pause" and self.phase == "run":
                epoch.pauses[worker] = commit_decision.parse_report(message)
                self._resize_if_all_paused(now)
            elif self.phase in ("run", "revoked"):
                self._on_epoch_message(worker, str(kind), message, now)

    def _locate(self, worker: int, message: Mapping[str, Any]) -> None:
        """Sends the addresses of the ranks that a member asks for, if they are here."""
        epoch, own = self.epoch, self._members[worker]
        try:
            ranks = expand(message["ranks"])
            workers = {rank: epoch.order[rank] for rank in ranks}
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"asked for no ranks: {error!r}") from None
        found = {
            str(rank): self._members[other].address_for(own)
            for rank, other in workers.items()
            if other in self._members
        }
        number = message.get("number")
        reply = {"type": "located", "epoch": epoch.number, "number": number}
        self._outbox.send(worker, reply | {"workers": found})

    def _on_epoch_message(
        self, worker: int, kind: str, message: Mapping[str, Any], now: float
    ) -> None:
        """Handles a message that ends the epoch or belongs to its end."""
        epoch = self.epoch
        if kind == "report":
            report = epoch.reports[worker] = commit_decision.parse_report(message)
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
            if accused in self._finished:
                self._revoke(now)  # the next epoch continues without this rank
            elif accused in epoch.alive and accused != worker:
                epoch.accuse(worker, accused, text, now)
                if self.phase == "run":
                    self._revoke(now)

    def on_disconnected(self, worker: int, why: str, now: float) -> None:
        """Handles the end of a worker's connection."""
        self._connected.discard(worker)
        exited = worker in self._exited
        if exited:
            why = self._exited.pop(worker)[0]
            self._outbox.fenced.setdefault(worker, why)
        else:
            why = f"lost its connection to the coordinator ({why})"
        if self.phase == "assembly":
            self._assembly.leave(worker)
            self._members.pop(worker, None)
        if self._newcomers.pop(worker, None) is None:
            self._lose_if_member(worker, why, now)
        if exited:
            self._on_exit(worker, why, now)

    def _on_exit(self, worker: int, why: str, now: float) -> None:
        """Handles the end of a worker's process, if the worker was not a member."""
        if worker in self._finished or worker in self._outbox.dismissed:
            return
        if self.phase != "assembly":
            self._end_group(worker, why)
        elif self._assembly.resuming:  # the worker may have finished
            self._assembly.exclude(worker, why)
            self._assemble(now)
        else:
            self._end_group(worker, why)
            for mate in self._config.group_of(worker):
                self._assembly.exclude(mate, why)
            self._assemble(now)

    def process_ended(
        self, worker: int, text: str, now: float, *, heirs: bool = True
    ) -> None:
        """Handles the end of a worker's process. The worker's id is not used again.

        The last messages of the worker may still arrive, for example that it has
        finished. So the membership first waits up to `exit_grace` seconds until the
        connection of the worker closes.

        Args:
            text: the reason why the process has ended.
            heirs: whether newcomers may begin the job again if all members have ended
                in this way. Pass False if the host of the process cannot be reached,
                because the process may still run there. Also pass False after an error
                of the program, because the error would occur again.
        """
        if heirs and worker not in self._failed:
            self._replaceable.add(worker)
        if worker in self._connected:
            self._exited.setdefault(worker, (text, now + self._config.exit_grace))
        elif worker not in self._finished and worker not in self._outbox.dismissed:
            self._outbox.fenced.setdefault(worker, text)
            self._lose_if_member(worker, text, now)
            self._on_exit(worker, text, now)
        if self.phase == "waiting":
            self._admit(now)

    def mark_finished(self, worker: int, now: float) -> None:
        """Records that a worker has finished under an earlier coordinator."""
        self._finished.add(worker)
        self._assembly.exclude(worker, FINISHED)
        if self.phase == "assembly":
            self._assemble(now)

    def set_max_np(self, max_np: int, now: float) -> None:
        """Changes the largest number of members. Present members may stay."""
        self._max_np = max_np
        self._admit(now)

    def tick(self, now: float) -> None:
        """Handles the timeouts that have expired by `now`, see `deadline`."""
        for worker, (text, limit) in list(self._exited.items()):
            if now >= limit:
                self.on_disconnected(worker, text, now)
        self._announce_departures(now)
        if self.phase == "assembly":
            self._assemble(now)
            return
        config = self._config
        late = self._deadline is not None and now >= self._deadline
        if self.phase == "revoked":
            silent = self.epoch.silent(now, config.report_timeout)
            if late:
                text = f"did not report within {config.failure_timeout:g} s"
                silent |= dict.fromkeys(self.epoch.unreported(), text)
            if silent:
                self._lose(silent, now)
            self._conclude(now)
        elif not late:
            return
        elif self.phase == "waiting":
            limit = config.elastic_timeout
            self._stop(f"{self._shortage()}, and no more came within {limit:g} s")

    # -- assembly ----------------------------------------------------------------------

    def _reference(self) -> JsonObject:
        """Returns any member's hello, because all have equal versions and settings."""
        return next((info.hello for info in self._members.values()), {})

    def _start_mismatch(self, workers: Sequence[int]) -> str:
        """Returns why these workers cannot begin a job together, or ""."""
        hellos = [self._newcomers[worker].hello for worker in workers]
        found = (
            assembly.mismatch(hello, f"rank {rank}", hellos[0], "rank 0")
            for rank, hello in enumerate(hellos)
        )
        return next(filter(None, found), "")

    def _assemble(self, now: float) -> None:
        outcome = self._assembly.outcome(now)
        if isinstance(outcome, assembly.StartJob):
            text = self._start_mismatch(outcome.workers)
            outcome = assembly.FailJob(text) if text else outcome
        if isinstance(outcome, assembly.StartJob):
            self._form_epoch("start", outcome.workers)
        elif isinstance(outcome, assembly.ResumeJob):
            self._resume(outcome, now)
        elif isinstance(outcome, assembly.FailJob) and not self._config.stops_on_loss:
            self._stop(outcome.text)
        elif isinstance(outcome, assembly.FailJob):
            self._outbox.publish("stop", outcome.text)
            for rank in self._newcomers:
                refusal = {"type": "refused", "text": outcome.text}
                self._outbox.send(rank, refusal, last=True)
            self._newcomers.clear()
        if outcome is not None and self._config.stops_on_loss:
            # Collect ranks again, because the ranks may call `init` again.
            self.phase, self._assembly = "assembly", Assembly(self._config)
            self._missing_was_asked = False

    def _resume(self, found: assembly.ResumeJob, now: float) -> None:
        """Continues with the newest epoch that a member has sent."""
        state = found.state
        self.phase, self._deadline = "run", None
        self._term = found.term
        epoch = self.epoch = EpochState(state.epoch, state.order)
        resumed = {"type": "resumed", "epoch": epoch.number, "term": self._term}
        self._outbox.send_all(found.uninformed, dict(state.members))
        self._outbox.send_all((*found.uninformed, *found.informed), resumed)
        for worker in found.superseded:
            del self._members[worker]
            self._outbox.fence(worker, "the others went on without it")
        for worker in self._newcomers:
            self._welcome(worker)
        self._publish_members("resume")
        text = "did not come back to the coordinator"
        present = {*found.informed, *found.uninformed}
        missing = [worker for worker in epoch.order if worker not in present]
        self._finished |= found.finished.keys()
        for worker in self._finished.intersection(missing):
            epoch.remove(worker, FINISHED, found.finished.get(worker))
            missing.remove(worker)
        for worker, why in list(self._outbox.fenced.items()):
            if worker not in epoch.order:
                self._end_group(worker, why)
        if missing:
            self._lose({w: self._outbox.fenced.get(w, text) for w in missing}, now)
        self._announce()
