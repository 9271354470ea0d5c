"""A worker of an elastic job in simulated time, which follows the real protocol.

The `CoordinatorClient` is the real class. Links, communicators, the recovery and the
training loop are models. A call is one exchange of inputs between all ranks of an epoch
and an end barrier. A call with inline data has no end barrier, but its inputs stay in a
shared segment. job.py simulates the network, the coordinator and the failures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringjax.membership.client import CoordinatorClient
from ringjax.membership.directives import (
    Dismiss,
    EpochDirective,
    Fence,
    ResizePending,
    Revoke,
    Stop,
    Welcome,
)
from simulation.call import Call, CallKey, SimulatedComm, Violation

if TYPE_CHECKING:
    from simulation.job import Simulation


CAUSES = {Dismiss: "dismissed", Fence: "fenced", Stop: "stopped"}


class Channel:
    """A connection between a worker and a coordinator: two ordered streams.

    Attributes:
        worker: the number of the worker.
        term: the number of the coordinator, which each crash increases.
        up: the time at which the last message to the coordinator arrives.
        down: the time at which the last message to the worker arrives.
    """

    __slots__ = ("down", "term", "up", "worker")

    def __init__(self, worker: int, term: int) -> None:
        self.worker, self.term = worker, term
        self.up = self.down = 0.0


class SimulatedConnection:
    """Replaces `Connection`, and passes messages to the simulated network."""

    __slots__ = ("channel", "simulation", "worker")
    reconnects = True

    def __init__(self, simulation: Simulation, worker: int) -> None:
        self.simulation, self.worker = simulation, worker
        self.channel: Channel | None = None

    def send(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            self.simulation.send_up(self.channel, message)


class Worker:
    """A simulated worker process.

    `state` is "new", "work", "pause", "restart", "bye" (it leaves), "dead" or "end".
    """

    __slots__ = (
        "aborted", "base", "blocked", "call", "call_done", "cause", "client",
        "closed", "comm", "commit", "connection", "deferred", "done", "frozen",
        "history", "inline", "key", "leaving", "left", "log", "members",
        "must_restart", "newcomer", "number", "pending", "reported", "returned",
        "revoked", "simulation", "state", "step", "suspected", "used", "view",
    )  # fmt: skip

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation, self.number = simulation, number
        self.connection = SimulatedConnection(simulation, number)
        self.client = CoordinatorClient(number, self.connection, {})  # type: ignore[arg-type]
        self.state, self.cause = "new", ""
        self.frozen = False
        # Calls that wait until the worker is no longer frozen.
        self.deferred: list[tuple[Any, tuple[Any, ...]]] = []
        self.members: EpochDirective | None = None
        self.comm: SimulatedComm | None = None
        self.call: Call | None = None  # in flight
        self.blocked = False  # the operation waits for a communicator
        self.call_done = False
        self.key: CallKey = ()
        self.inline = False
        self.history: dict[int, tuple[int, ...]] = {}
        self.returned = self.done = 0
        self.aborted = self.closed = self.reported = self.revoked = False
        self.suspected: set[int] = set()
        self.left: set[int] = set()  # peers that have finished
        self.must_restart, self.newcomer, self.leaving = False, False, False
        self.pending = 0  # the number of the announced resize
        self.log: dict[CallKey, CallKey] = {}
        # The training loop: samples used so far, as a bit mask, and steps.
        self.used = self.step = 0
        self.commit = (0, 0)
        self.view: tuple[int, ...] = ()
        self.base = 0

    # --- directives ---

    def on_message(self, message: dict[str, Any]) -> None:
        """Handles a message from the coordinator."""
        client = self.client
        with client._changed:
            first = client._first
            client.on_message(message)
            directives, client._directives = client._directives, []
        if first is None and client._first is not None:
            directives.insert(0, client._first)
        if client._leave_acknowledged:
            self.finish("finished")
        for directive in directives:
            ends = isinstance(directive, Dismiss | Fence | Stop)
            if self.state == "end" or (self.state == "bye" and not ends):
                return
            self.on_directive(directive)

    def on_directive(self, directive: Any) -> None:
        if isinstance(directive, EpochDirective):
            self.on_members(directive)
        elif isinstance(directive, Revoke):
            self.revoked = True
            self.abort()
            if self.closed:
                self.report()
        elif isinstance(directive, ResizePending):
            self.pending = directive.number
        elif isinstance(directive, Welcome):
            self.newcomer = True
            self.simulation.at(self.simulation.delay(20), self.finish_warm_up)
        elif isinstance(directive, Dismiss | Fence | Stop):
            self.finish(CAUSES[type(directive)], directive.text)

    def finish_warm_up(self) -> None:
        if self.state == "new":
            self.client.ready()

    def finish(self, cause: str, text: str = "") -> None:
        self.state, self.cause, self.call = "end", cause, None
        self.simulation.ended(self, text)

    def on_members(self, directive: EpochDirective) -> None:
        """Applies the commit decisions and starts to build the next communicator."""
        old, simulation = self.members, self.simulation
        if old is not None and directive.epoch <= old.epoch:
            raise Violation(
                f"I5: {self.number} gets {directive.epoch} after {old.epoch}"
            )
        workers = tuple(member.worker for member in directive.members)
        simulation.check_formation(directive.epoch, workers)
        self.members, self.history[directive.epoch] = directive, workers
        call = self.call
        self.call = self.comm = None
        self.aborted = self.closed = self.reported = self.revoked = False
        self.suspected.clear()
        self.left.clear()
        self.returned = self.done = self.pending = 0
        comm = simulation.comm(directive.epoch, workers)
        comm.ready.add(self.number)
        simulation.schedule_observations(self, workers)
        if directive.kind != "repair":
            self.base = directive.epoch
            self.view = self.view or workers
            self.must_restart = directive.kind != "start" or self.newcomer
            self.newcomer = False
        self.apply_decision(call, directive)
        if len(comm.ready) == comm.size:
            for number in workers:
                simulation.at(simulation.delay(2), self.install_at, number, comm)

    def install_at(self, number: int, comm: SimulatedComm) -> None:
        self.simulation.workers[number].install(comm)

    def apply_decision(self, call: Call | None, directive: EpochDirective) -> None:
        finished, repeats = directive.decisions.get(0, (0, directive.kind == "repair"))
        if self.simulation.wrong == "naive" and call is not None:
            finished, repeats = (call.number if self.call_done else 0), True
        if self.state in ("pause", "restart") and directive.kind == "repair":
            if self.state == "pause":
                self.send_pause()
            else:
                self.client.restart(directive.epoch, "again")
        elif self.state in ("pause", "restart", "new"):
            self.state = "work"
            self.next_soon()
        elif call is not None and call.number <= finished:
            if not self.call_done and not (
                call.inline and len(call.inputs) == call.comm.size
            ):
                raise Violation(f"I1: {self.number} has no result of {call.key}")
            self.result(call)
        elif call is not None or self.blocked:
            kept = repeats and directive.kind == "repair"
            if kept and call is not None and call.key[0] == "sync":
                kept = call.comm.order[0] in self.history[directive.epoch]  # the root
            if kept:
                self.blocked = True
            else:
                self.fail()

    def install(self, comm: SimulatedComm) -> None:
        """Starts to use the communicator, whose links are all connected."""
        members = self.members
        if self.frozen:
            self.deferred.append((self.install, (comm,)))
        elif (
            self.state != "end"
            and members is not None
            and members.epoch == comm.epoch
            and self.history[comm.epoch] == comm.order
            and not self.aborted
        ):
            self.comm = comm
            if self.blocked:
                self.enter()

    # --- losses ---

    def abort(self) -> None:
        """Aborts the communicator on this worker. Its calls stop some time later."""
        if not self.aborted and self.members is not None and self.state != "end":
            self.aborted = True
            self.simulation.at(
                self.simulation.delay(), self.quiesce, self.members.epoch
            )

    def quiesce(self, epoch: int) -> None:
        if self.frozen:
            self.deferred.append((self.quiesce, (epoch,)))
        elif self.state != "end" and self.members and self.members.epoch == epoch:
            self.closed = True
            if self.call is not None:
                self.blocked = True
            if self.revoked or self.simulation.eager:
                self.report()

    def report(self) -> None:
        if self.reported or self.members is None:
            return
        self.reported = True
        line = (self.returned, self.done, not self.simulation.loses_inputs(self))
        lines = {0: line if self.comm is not None else (0, 0, True)}
        self.client.report(self.members.epoch, lines)

    def on_peer_silent(self, other: int, epoch: int) -> None:
        """Handles the missing heartbeat of a peer."""
        if self.frozen:
            self.deferred.append((self.on_peer_silent, (other, epoch)))
            return
        members = self.members
        if members is None or members.epoch != epoch or self.state == "end":
            return
        if other in self.suspected or not self.simulation.is_silent(self.number, other):
            return
        self.suspected.add(other)
        rank = self.history[epoch].index(other)
        self.client.suspect(epoch, rank, "silent")
        self.abort()
        for worker in self.history[epoch]:  # all members notice the abort
            peer = self.simulation.workers[worker]
            if peer is not self and not self.simulation.is_separated(
                self.number, worker
            ):
                self.simulation.at(self.simulation.delay(), peer.on_peer_abort, epoch)

    def on_peer_finished(self, other: int, epoch: int) -> None:
        """Handles a heartbeat that says that its peer has finished."""
        if self.frozen:
            self.deferred.append((self.on_peer_finished, (other, epoch)))
        elif self.members is not None and self.members.epoch == epoch:
            self.left.add(other)
            self.suspect_finished()

    def suspect_finished(self) -> None:
        """Suspects peers that have finished, if a call waits for them."""
        members = self.members
        if not (self.left and members and (self.call or self.blocked)):
            return
        if self.state in ("work", "new"):
            for other in self.left - self.suspected:
                self.suspected.add(other)
                rank = self.history[members.epoch].index(other)
                self.client.suspect(members.epoch, rank, "it has left")
            self.abort()

    def on_peer_abort(self, epoch: int) -> None:
        if self.frozen:
            self.deferred.append((self.on_peer_abort, (epoch,)))
        elif self.members is not None and self.members.epoch == epoch:
            self.abort()

    # --- calls ---

    def enter(self) -> None:
        """Sends this rank's input to the next call of the communicator."""
        comm = self.comm
        assert comm is not None
        number = self.returned
        if len(comm.calls) == number:
            comm.calls.append(Call(comm, number + 1, self.key, self.inline))
        call = comm.calls[number]
        if call.key != self.key:
            raise Violation(f"I1: {self.number} is at {self.key}, others {call.key}")
        self.call, self.blocked, self.call_done = call, False, False
        if self.inline:
            value: Any = (0, self.pending)
        elif self.key[0] == "sync":
            value = self.commit
        else:
            value = (self.batch(), 0)
        call.inputs[self.number] = value
        self.simulation.send_to_peers(
            call, self.number, call.inputs, call.arrivals, "complete"
        )

    def complete(self, call: Call) -> None:
        """Handles the arrival of the last input on this worker."""
        if self.frozen:
            self.deferred.append((self.complete, (call,)))
        elif self.call is call and not self.closed and not self.call_done:
            if not call.inline and self.simulation.is_lost(self.number, call.arrivals):
                return
            self.done, self.call_done = call.number, True
            if call.inline or self.simulation.wrong == "no barrier":
                self.returned = call.number
                self.call = None
                self.result(call)
            else:
                call.ended[self.number] = True
                simulation = self.simulation
                simulation.send_to_peers(
                    call, self.number, call.ended, call.endings, "released"
                )

    def released(self, call: Call) -> None:
        """Returns from the call, since all ranks have complete results."""
        if self.frozen:
            self.deferred.append((self.released, (call,)))
        elif self.call is call and not self.closed:
            if self.simulation.is_lost(self.number, call.endings):
                return
            self.returned = call.number
            self.call = None
            self.result(call)

    def fail(self) -> None:
        """Fails the call: all workers return to the last commit."""
        self.log[self.key] = ("failed",)
        self.call, self.blocked = None, False
        self.ask_restart()

    def ask_restart(self) -> None:
        if self.must_restart:  # a restart has been decided already
            self.state = "work"
            self.next_soon()
            return
        self.state = "restart"
        assert self.members is not None
        self.client.restart(self.members.epoch, "an error")

    # --- the training loop ---

    def batch(self) -> int:
        """Returns this rank's sample of the step, as a bit mask of unused samples."""
        rest = [s for s in range(self.simulation.samples) if not self.used >> s & 1]
        rank = self.view.index(self.number)
        return 1 << rest[rank] if rank < len(rest) else 0

    def next_soon(self) -> None:
        self.simulation.at(self.simulation.delay(), self.next)

    def next(self) -> None:
        """Starts the program's next operation."""
        if self.frozen:
            self.deferred.append((self.next, ()))
            return
        if self.state != "work":
            return
        if self.must_restart:
            self.must_restart = False
            self.used, self.step = self.commit
            self.view = self.history[self.base]
            self.key, self.inline = ("sync", self.base), False
        elif self.used == (1 << self.simulation.samples) - 1:
            lines = {0: (self.returned, self.done, True)}
            if self.simulation.wrong == "silent leave" or self.comm is None:
                lines = {}
            self.client.leave(lines)
            self.state = "bye"
            self.simulation.report_leave(self.number)
            return
        elif self.simulation.raises_error():
            self.ask_restart()
            return
        else:
            self.key, self.inline = ("step", self.base, self.step), False
        self.start()

    def start(self) -> None:
        if self.must_restart:
            self.fail()
            return
        self.blocked = True
        if self.comm is not None and not self.aborted:
            self.enter()
        self.suspect_finished()

    def result(self, call: Call) -> None:
        """Handles the return of a call without an error."""
        value = call.value()
        self.call, self.blocked = None, False
        self.log[self.key] = value
        kind = self.key[0]
        if kind == "sync":
            self.used, self.step = self.commit = value[1]
        elif kind == "step":
            if self.used & value[1]:
                raise Violation(f"I6: samples used twice at {self.key}: {value}")
            self.used |= value[1]
            self.step += 1
            self.commit = (self.used, self.step)
            self.key, self.inline = ("check", self.base, self.step), True
            self.start()
            return
        elif value[2]:
            self.send_pause()
            return
        elif value[3] != self.base:
            self.view = self.history[value[3]]
        self.next_soon()

    def send_pause(self) -> None:
        if self.must_restart:
            self.next_soon()
            return
        self.state = "pause"
        assert self.members is not None
        self.client.pause(self.members.epoch, 1)
