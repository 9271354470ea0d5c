"""A worker of an elastic job, as far as the protocol goes, in simulated time.

It has the real `CoordinatorClient`; links, communicators, the recovery and the training
loop are models. A call is one exchange of inputs between all ranks of an epoch and an
end barrier. A call with inline data has no end barrier, but its inputs stay in a shared
segment. The world around it is in job.py.
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


ENDS = {Dismiss: "dismissed", Fence: "fenced", Stop: "stopped"}


class Channel:
    """A connection between a worker and a coordinator: two ordered streams.

    Attributes:
        worker: the number of the worker.
        term: the coordinator; each crash increases the term.
        up: when the last message to the coordinator arrives.
        down: when the last message to the worker arrives.
    """

    __slots__ = ("down", "term", "up", "worker")

    def __init__(self, worker: int, term: int) -> None:
        self.worker, self.term = worker, term
        self.up = self.down = 0.0


class SimulatedConnection:
    """Replaces `Connection`: passes messages to the simulated network."""

    __slots__ = ("channel", "worker", "world")
    reconnects = True

    def __init__(self, world: Simulation, worker: int) -> None:
        self.world, self.worker = world, worker
        self.channel: Channel | None = None

    def send(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            self.world.send_up(self.channel, message)


class Worker:
    """A simulated worker process; `state` is "new", "work", "end" or between."""

    __slots__ = (
        "aborted", "base", "blocked", "call", "call_done", "cause", "client",
        "closed", "comm", "commit", "connection", "deferred", "done", "frozen",
        "history", "inline", "key", "leaving", "left", "log", "members",
        "must_restart", "newcomer", "number", "pending", "reported", "returned",
        "revoked", "state", "step", "suspected", "used", "view", "world",
    )  # fmt: skip

    def __init__(self, world: Simulation, number: int) -> None:
        self.world, self.number = world, number
        self.connection = SimulatedConnection(world, number)
        self.client = CoordinatorClient(number, self.connection, {})  # type: ignore[arg-type]
        self.state, self.cause = "new", ""
        self.frozen = False
        self.deferred: list[
            tuple[Any, tuple[Any, ...]]
        ] = []  # until the worker is thawed
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
        self.pending = 0  # announced change
        self.log: dict[CallKey, CallKey] = {}
        # The training loop: samples used so far, as a bit mask, and steps.
        self.used = self.step = 0
        self.commit = (0, 0)
        self.view: tuple[int, ...] = ()
        self.base = 0

    # --- directives ---

    def on_message(self, message: dict[str, Any]) -> None:
        """Handles a message of the coordinator."""
        client = self.client
        with client._changed:
            first = client._first
            client.on_message(message)
            heard, client._directives = client._directives, []
        if first is None and client._first is not None:
            heard.insert(0, client._first)
        if client._leave_acknowledged:
            self.finish("finished")
        for directive in heard:
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
            self.world.at(self.world.delay(20), self.warm)
        elif isinstance(directive, Dismiss | Fence | Stop):
            self.finish(ENDS[type(directive)], directive.text)

    def warm(self) -> None:
        if self.state == "new":
            self.client.ready()

    def finish(self, cause: str, text: str = "") -> None:
        self.state, self.cause, self.call = "end", cause, None
        self.world.ended(self, text)

    def on_members(self, directive: EpochDirective) -> None:
        """Applies the decisions and begins to build the next communicator."""
        old, world = self.members, self.world
        if old is not None and directive.epoch <= old.epoch:
            raise Violation(
                f"I5: {self.number} gets {directive.epoch} after {old.epoch}"
            )
        workers = tuple(member.worker for member in directive.members)
        world.formed(directive.epoch, workers)
        self.members, self.history[directive.epoch] = directive, workers
        call = self.call
        self.call = self.comm = None
        self.aborted = self.closed = self.reported = self.revoked = False
        self.suspected.clear()
        self.left.clear()
        self.returned = self.done = self.pending = 0
        build = world.comm(directive.epoch, workers)
        build.ready.add(self.number)
        world.watch(self, workers)
        if directive.kind != "repair":
            self.base = directive.epoch
            self.view = self.view or workers
            self.must_restart = directive.kind != "start" or self.newcomer
            self.newcomer = False
        self.apply_decision(call, directive)
        if len(build.ready) == build.size:
            for number in workers:
                world.at(world.delay(2), self.install_at, number, build)

    def install_at(self, number: int, build: SimulatedComm) -> None:
        self.world.workers[number].install(build)

    def apply_decision(self, call: Call | None, directive: EpochDirective) -> None:
        finished, repeats = directive.decisions.get(0, (0, directive.kind == "repair"))
        if self.world.wrong == "naive" and call is not None:
            finished, repeats = (call.number if self.call_done else 0), True
        if self.state in ("pause", "restart") and directive.kind == "repair":
            if self.state == "pause":
                self.say_pause()
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

    def install(self, build: SimulatedComm) -> None:
        """Starts to use the communicator, whose links are all connected."""
        members = self.members
        if self.frozen:
            self.deferred.append((self.install, (build,)))
        elif (
            self.state != "end"
            and members is not None
            and members.epoch == build.epoch
            and self.history[build.epoch] == build.order
            and not self.aborted
        ):
            self.comm = build
            if self.blocked:
                self.enter()

    # --- losses ---

    def abort(self) -> None:
        """Ends the communicator on this worker; its calls stop a bit later."""
        if not self.aborted and self.members is not None and self.state != "end":
            self.aborted = True
            self.world.at(self.world.delay(), self.quiesce, self.members.epoch)

    def quiesce(self, epoch: int) -> None:
        if self.frozen:
            self.deferred.append((self.quiesce, (epoch,)))
        elif self.state != "end" and self.members and self.members.epoch == epoch:
            self.closed = True
            if self.call is not None:
                self.blocked = True
            if self.revoked or self.world.eager:
                self.report()

    def report(self) -> None:
        if self.reported or self.members is None:
            return
        self.reported = True
        line = (self.returned, self.done, not self.world.unlucky(self))
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
        if other in self.suspected or not self.world.silent(self.number, other):
            return
        self.suspected.add(other)
        rank = self.history[epoch].index(other)
        self.client.suspect(epoch, rank, "silent")
        self.abort()
        for worker in self.history[epoch]:  # all members notice the abort
            peer = self.world.workers[worker]
            if peer is not self and not self.world.is_separated(self.number, worker):
                self.world.at(self.world.delay(), peer.on_peer_abort, epoch)

    def on_peer_finished(self, other: int, epoch: int) -> None:
        """Handles a heartbeat that says that its peer has finished."""
        if self.frozen:
            self.deferred.append((self.on_peer_finished, (other, epoch)))
        elif self.members is not None and self.members.epoch == epoch:
            self.left.add(other)
            self.accuse_finished()

    def accuse_finished(self) -> None:
        """Accuses peers that have finished, if a call waits for them."""
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
        build = self.comm
        assert build is not None
        number = self.returned
        if len(build.calls) == number:
            build.calls.append(Call(build, number + 1, self.key, self.inline))
        call = build.calls[number]
        if call.key != self.key:
            raise Violation(f"I1: {self.number} is at {self.key}, others {call.key}")
        self.call, self.blocked, self.call_done = call, False, False
        if self.inline:
            given: Any = (0, self.pending)
        elif self.key[0] == "sync":
            given = self.commit
        else:
            given = (self.batch(), 0)
        call.inputs[self.number] = given
        self.world.spread(call, self.number, call.inputs, call.arrivals, "complete")

    def complete(self, call: Call) -> None:
        """Handles the arrival of the last input on this worker."""
        if self.frozen:
            self.deferred.append((self.complete, (call,)))
        elif self.call is call and not self.closed and not self.call_done:
            if not call.inline and self.world.cut(self.number, call.arrivals):
                return
            self.done, self.call_done = call.number, True
            if call.inline or self.world.wrong == "no barrier":
                self.returned = call.number
                self.call = None
                self.result(call)
            else:
                call.ended[self.number] = True
                world = self.world
                world.spread(call, self.number, call.ended, call.endings, "released")

    def released(self, call: Call) -> None:
        """Returns from the call, since all ranks have complete results."""
        if self.frozen:
            self.deferred.append((self.released, (call,)))
        elif self.call is call and not self.closed:
            if self.world.cut(self.number, call.endings):
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
        """This rank's samples of the step, chosen by the used samples and the epoch."""
        rest = [s for s in range(self.world.samples) if not self.used >> s & 1]
        rank = self.view.index(self.number)
        return 1 << rest[rank] if rank < len(rest) else 0

    def next_soon(self) -> None:
        self.world.at(self.world.delay(), self.next)

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
        elif self.used == (1 << self.world.samples) - 1:
            lines = {0: (self.returned, self.done, True)}
            if self.world.wrong == "silent leave" or self.comm is None:
                lines = {}
            self.client.leave(lines)
            self.state = "bye"
            self.world.tell_left(self.number)
            return
        elif self.world.raises():
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
        self.accuse_finished()

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
            self.say_pause()
            return
        elif value[3] != self.base:
            self.view = self.history[value[3]]
        self.next_soon()

    def say_pause(self) -> None:
        if self.must_restart:
            self.next_soon()
            return
        self.state = "pause"
        assert self.members is not None
        self.client.pause(self.members.epoch, 1)
