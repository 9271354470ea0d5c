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
from simulation.call import Call, Generation, Key, Violation

if TYPE_CHECKING:
    from simulation.job import Simulation


ENDS = {Dismiss: "dismissed", Fence: "fenced", Stop: "stopped"}


class Connection:
    """Between a worker and the coordinator: two orderly streams."""

    __slots__ = ("down", "hub", "up", "worker")

    def __init__(self, worker: int, hub: int) -> None:
        self.worker, self.hub = worker, hub
        self.up = self.down = 0.0


class Line:
    """Stands in for `Connection`: hands messages to the simulated network."""

    __slots__ = ("connection", "worker", "world")
    reconnects = True

    def __init__(self, world: Simulation, worker: int) -> None:
        self.world, self.worker = world, worker
        self.connection: Any = None

    def send(self, message: dict[str, Any]) -> None:
        if self.connection is not None:
            self.world.hub_send(self.connection, message)


class Worker:
    """One process: `state` is "new", "work", "end" and the like."""

    __slots__ = (
        *("aborted", "base", "call", "call_done", "cause", "closed", "commit"),
        *("deferred", "done", "client", "frozen", "generation", "history", "key"),
        *("leaving", "left", "line", "log", "members", "must_restart", "newcomer"),
        *("note", "number", "parked", "pending", "reported", "returned", "revoked"),
        *("state", "step", "suspected", "used", "view", "world"),
    )

    def __init__(self, world: Simulation, number: int) -> None:
        self.world, self.number = world, number
        self.line = Line(world, number)
        self.client = CoordinatorClient(number, self.line, {})  # type: ignore[arg-type]
        self.state, self.cause = "new", ""
        self.frozen = False
        self.deferred: list[tuple[Any, tuple[Any, ...]]] = []  # until it is thawed
        self.members: EpochDirective | None = None
        self.generation: Generation | None = None
        self.call: Call | None = None  # in flight
        self.parked = False  # the operation waits for a generation
        self.call_done = False
        self.key: Key = ()
        self.note = False
        self.history: dict[int, tuple[int, ...]] = {}
        self.returned = self.done = 0
        self.aborted = self.closed = self.reported = self.revoked = False
        self.suspected: set[int] = set()
        self.left: set[int] = set()  # who has finished
        self.must_restart, self.newcomer, self.leaving = False, False, False
        self.pending = 0  # announced change
        self.log: dict[Key, Key] = {}
        # The training loop: samples used so far, as a bit mask, and steps.
        self.used = self.step = 0
        self.commit = (0, 0)
        self.view: tuple[int, ...] = ()
        self.base = 0

    # --- orders ---

    def hear(self, message: dict[str, Any]) -> None:
        """A message of the coordinator has come."""
        client = self.client
        with client._changed:
            first = client._first
            client.on_message(message)
            heard, client._directives = client._directives, []
        if first is None and client._first is not None:
            heard.insert(0, client._first)
        if client._leave_acknowledged:
            self.finish("finished")
        for order in heard:
            ends = isinstance(order, Dismiss | Fence | Stop)
            if self.state == "end" or (self.state == "bye" and not ends):
                return
            self.obey(order)

    def obey(self, order: Any) -> None:
        if isinstance(order, EpochDirective):
            self.on_members(order)
        elif isinstance(order, Revoke):
            self.revoked = True
            self.abort()
            if self.closed:
                self.report()
        elif isinstance(order, ResizePending):
            self.pending = order.number
        elif isinstance(order, Welcome):
            self.newcomer = True
            self.world.at(self.world.delay(20), self.warm)
        elif isinstance(order, Dismiss | Fence | Stop):
            self.finish(ENDS[type(order)], order.text)

    def warm(self) -> None:
        if self.state == "new":
            self.client.ready()

    def finish(self, cause: str, text: str = "") -> None:
        self.state, self.cause, self.call = "end", cause, None
        self.world.ended(self, text)

    def on_members(self, order: EpochDirective) -> None:
        """Applies the verdict and begins to build the next generation."""
        old, world = self.members, self.world
        if old is not None and order.epoch <= old.epoch:
            raise Violation(f"I5: {self.number} gets {order.epoch} after {old.epoch}")
        workers = tuple(member.worker for member in order.members)
        world.formed(order.epoch, workers)
        self.members, self.history[order.epoch] = order, workers
        call = self.call
        self.call = self.generation = None
        self.aborted = self.closed = self.reported = self.revoked = False
        self.suspected.clear()
        self.left.clear()
        self.returned = self.done = self.pending = 0
        build = world.generation(order.epoch, workers)
        build.ready.add(self.number)
        world.watch(self, workers)
        if order.kind != "repair":
            self.base = order.epoch
            self.view = self.view or workers
            self.must_restart = order.kind != "start" or self.newcomer
            self.newcomer = False
        self.obey_verdict(call, order)
        if len(build.ready) == build.size:
            for number in workers:
                world.at(world.delay(2), self.install_at, number, build)

    def install_at(self, number: int, build: Generation) -> None:
        self.world.workers[number].install(build)

    def obey_verdict(self, call: Call | None, order: EpochDirective) -> None:
        finished, repeats = order.decisions.get(0, (0, order.kind == "repair"))
        if self.world.wrong == "naive" and call is not None:
            finished, repeats = (call.number if self.call_done else 0), True
        if self.state in ("pause", "restart") and order.kind == "repair":
            if self.state == "pause":
                self.say_pause()
            else:
                self.client.restart(order.epoch, "again")
        elif self.state in ("pause", "restart", "new"):
            self.state = "work"
            self.next_soon()
        elif call is not None and call.number <= finished:
            if not self.call_done and not (
                call.note and len(call.inputs) == call.generation.size
            ):
                raise Violation(f"I1: {self.number} has no result of {call.key}")
            self.result(call)
        elif call is not None or self.parked:
            kept = repeats and order.kind == "repair"
            if kept and call is not None and call.key[0] == "sync":
                kept = call.generation.order[0] in self.history[order.epoch]  # the root
            if kept:
                self.parked = True
            else:
                self.fail()

    def install(self, build: Generation) -> None:
        """All links of the generation are there."""
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
            self.generation = build
            if self.parked:
                self.enter()

    # --- losses ---

    def abort(self) -> None:
        """The present generation is over here; calls stop a bit later."""
        if not self.aborted and self.members is not None and self.state != "end":
            self.aborted = True
            self.world.at(self.world.delay(), self.quiesce, self.members.epoch)

    def quiesce(self, epoch: int) -> None:
        if self.frozen:
            self.deferred.append((self.quiesce, (epoch,)))
        elif self.state != "end" and self.members and self.members.epoch == epoch:
            self.closed = True
            if self.call is not None:
                self.parked = True
            if self.revoked or self.world.eager:
                self.report()

    def report(self) -> None:
        if self.reported or self.members is None:
            return
        self.reported = True
        line = (self.returned, self.done, not self.world.unlucky(self))
        lines = {0: line if self.generation is not None else (0, 0, True)}
        self.client.report(self.members.epoch, lines)

    def notice(self, other: int, epoch: int) -> None:
        """The heartbeat says that another rank is gone."""
        if self.frozen:
            self.deferred.append((self.notice, (other, epoch)))
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
        for worker in self.history[epoch]:  # the cascade
            peer = self.world.workers[worker]
            if peer is not self and not self.world.torn(self.number, worker):
                self.world.at(self.world.delay(), peer.hear_cascade, epoch)

    def notice_left(self, other: int, epoch: int) -> None:
        """The heartbeat says that another rank has finished."""
        if self.frozen:
            self.deferred.append((self.notice_left, (other, epoch)))
        elif self.members is not None and self.members.epoch == epoch:
            self.left.add(other)
            self.blame_left()

    def blame_left(self) -> None:
        """A call waits for somebody who will not come."""
        members = self.members
        if not (self.left and members and (self.call or self.parked)):
            return
        if self.state in ("work", "new"):
            for other in self.left - self.suspected:
                self.suspected.add(other)
                rank = self.history[members.epoch].index(other)
                self.client.suspect(members.epoch, rank, "it has left")
            self.abort()

    def hear_cascade(self, epoch: int) -> None:
        if self.frozen:
            self.deferred.append((self.hear_cascade, (epoch,)))
        elif self.members is not None and self.members.epoch == epoch:
            self.abort()

    # --- calls ---

    def enter(self) -> None:
        """Gives this rank's input to the next call of the generation."""
        build = self.generation
        assert build is not None
        number = self.returned
        if len(build.calls) == number:
            build.calls.append(Call(build, number + 1, self.key, self.note))
        call = build.calls[number]
        if call.key != self.key:
            raise Violation(f"I1: {self.number} is at {self.key}, others {call.key}")
        self.call, self.parked, self.call_done = call, False, False
        if self.note:
            given: Any = (0, self.pending)
        elif self.key[0] == "sync":
            given = self.commit
        else:
            given = (self.batch(), 0)
        call.inputs[self.number] = given
        self.world.spread(call, self.number, call.inputs, call.arrivals, "complete")

    def complete(self, call: Call) -> None:
        """All inputs have arrived here."""
        if self.frozen:
            self.deferred.append((self.complete, (call,)))
        elif self.call is call and not self.closed and not self.call_done:
            if not call.note and self.world.cut(self.number, call.arrivals):
                return
            self.done, self.call_done = call.number, True
            if call.note or self.world.wrong == "no barrier":
                self.returned = call.number
                self.call = None
                self.result(call)
            else:
                call.ended[self.number] = True
                world = self.world
                world.spread(call, self.number, call.ended, call.endings, "released")

    def released(self, call: Call) -> None:
        """All ranks are known to have complete results."""
        if self.frozen:
            self.deferred.append((self.released, (call,)))
        elif self.call is call and not self.closed:
            if self.world.cut(self.number, call.endings):
                return
            self.returned = call.number
            self.call = None
            self.result(call)

    def fail(self) -> None:
        """The call raises an error: all go back to the last commit."""
        self.log[self.key] = ("failed",)
        self.call, self.parked = None, False
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
        """This rank's samples of the step: a function of what is used, and the view."""
        rest = [s for s in range(self.world.samples) if not self.used >> s & 1]
        rank = self.view.index(self.number)
        return 1 << rest[rank] if rank < len(rest) else 0

    def next_soon(self) -> None:
        self.world.at(self.world.delay(), self.next)

    def next(self) -> None:
        """The program goes on to its next operation."""
        if self.frozen:
            self.deferred.append((self.next, ()))
            return
        if self.state != "work":
            return
        if self.must_restart:
            self.must_restart = False
            self.used, self.step = self.commit
            self.view = self.history[self.base]
            self.key, self.note = ("sync", self.base), False
        elif self.used == (1 << self.world.samples) - 1:
            lines = {0: (self.returned, self.done, True)}
            if self.world.wrong == "silent leave" or self.generation is None:
                lines = {}
            self.client.leave(lines)
            self.state = "bye"
            self.world.tell_left(self.number)
            return
        elif self.world.raises():
            self.ask_restart()
            return
        else:
            self.key, self.note = ("step", self.base, self.step), False
        self.start()

    def start(self) -> None:
        if self.must_restart:
            self.fail()
            return
        self.parked = True
        if self.generation is not None and not self.aborted:
            self.enter()
        self.blame_left()

    def result(self, call: Call) -> None:
        """A call returns without an error."""
        value = call.value()
        self.call, self.parked = None, False
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
            self.key, self.note = ("check", self.base, self.step), True
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
