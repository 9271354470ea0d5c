"""A simulation of elastic jobs: many short jobs, each decided by a seed.

    python -m simulation --seeds 0 100000

Workers (worker.py) train over a network with random delays. Workers and the coordinator
are killed, frozen, separated, started and dismissed at random moments. `JobMembership`,
the rules of the coordinator, and `CoordinatorClient`, the end of a worker, are the real
classes. At the end of each job these invariants must hold:

I1  every call has the same commit decision and result on all survivors
I2  a result is the sum over one membership
I3  nobody is blocked, and the job stops early only with too few ranks
I4  all survivors end in one history, not in two
I5  epochs only grow, for every worker
I6  every sample is used exactly once in the steps that count
I7  groups are lost and admitted whole

With groups, a rank sends its inputs only to the ranks with the same position in other
groups. A call ends when all ranks have complete results (`ringjax/world/groups.py`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.membership import JobMembership
from simulation import wrong_rules
from simulation.call import Call, SimulatedComm, Violation
from simulation.worker import Channel, Worker

FAILURE_TIMEOUT = 5.0  # seconds of silence after which a peer is suspected
MAX_EVENTS = 20000


class Simulation:
    """Simulates a job.

    Args:
        seed: decides everything that happens.
        wrong: the name of a planted mistake of wrong_rules.py, or "".
        group: the number of workers that are lost together and join together.
    """

    __slots__ = (
        "comms", "config", "counter", "crashes", "cuts", "eager", "events",
        "failing", "finished", "formations", "frozen_at", "group", "membership",
        "min_np", "now", "pairs", "present", "raising", "random", "replace",
        "samples", "seed", "term", "tick_at", "workers", "wrong",
    )  # fmt: skip

    def __init__(self, seed: int, wrong: str = "", group: int = 1) -> None:
        self.seed, self.wrong, self.group = seed, wrong, group
        rng = random.Random(seed)
        self.random = rng.random
        self.now, self.counter = 0.0, 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        count = rng.choice((2, 3, 3, 4)) if group == 1 else rng.choice((2, 2, 3))
        least = rng.randint(1, count)
        most = count + (rng.random() < 0.3)
        np, self.min_np = group * count, group * least
        self.config = MembershipConfig(np, self.min_np, group * most, group=group)
        self.samples = rng.randint(np + 1, 3 * np)
        self.eager = rng.random() < 0.3
        self.raising = 0.02 if rng.random() < 0.2 else 0.0
        self.failing = 0.3 if rng.random() < 0.15 else 0.0
        self.replace = rng.random() < 0.7
        self.term, self.crashes = 0, 0
        self.finished: set[int] = set()
        self.membership = JobMembership(self.config)
        self.present: dict[int, Channel] = {}
        self.tick_at: float | None = None
        self.workers: dict[int, Worker] = {}
        self.pairs: set[tuple[int, int]] = set()  # workers that cannot reach each other
        self.cuts: dict[tuple[int, int], float] = {}  # (from, to): messages are lost
        self.comms: dict[tuple[int, tuple[int, ...]], SimulatedComm] = {}
        self.formations: dict[tuple[int, int], tuple[int, ...]] = {}
        for _ in range(count):
            self.at(self.delay(), self.launch)
        self.plan(rng)

    # --- time ---

    def at(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        """Schedules a call of `function` after `delay` seconds."""
        self.counter += 1
        heapq.heappush(self.events, (self.now + delay, self.counter, function, args))

    def delay(self, times: float = 1.0) -> float:
        return self.random() * 0.005 * times

    def plan(self, rng: random.Random) -> None:
        """Schedules the failures."""
        kinds = (
            self.kill,
            self.freeze,
            self.separate,
            self.crash,
            self.join,
            self.leave,
        )
        when = 0.0
        for count in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
            if count and rng.random() < 0.5:
                when += rng.random() * 0.04
            else:
                when = rng.random() * 0.2
            (kind,) = rng.choices(kinds, (9, 3, 2, 2, 2, 2))
            self.at(when, kind)

    def run(self) -> None:
        """Runs all events, then checks the invariants; raises Violation."""
        events, pop = self.events, heapq.heappop
        while events:
            self.now, _, function, args = pop(events)
            function(*args)
            if self.counter > MAX_EVENTS:
                raise Violation("I3: it never ends")
        self.check()

    # --- the failures ---

    def choose(self) -> Worker | None:
        """Returns a random running worker, or None if none runs."""
        alive = [w for w in self.workers.values() if w.state not in ("dead", "end")]
        return alive[int(self.random() * len(alive))] if alive else None

    def launch(self) -> None:
        for _ in range(self.group):
            number = len(self.workers)
            worker = self.workers[number] = Worker(self, number)
            self.membership.expect(number)
            self.at(self.delay(), self.connect, worker)

    join = launch

    def leave(self) -> None:
        if (worker := self.choose()) is not None and not worker.leaving:
            worker.leaving = True
            if worker.frozen:
                worker.deferred.append((worker.client.request_leave, ()))
            else:
                worker.client.request_leave()

    def kill(self, worker: Worker | None = None) -> None:
        worker = worker or self.choose()
        if worker is None or worker.state in ("dead", "end"):
            return
        worker.state, worker.call, worker.members = "dead", None, None
        channel, worker.connection.channel = worker.connection.channel, None
        for other in self.workers:
            if self.random() < 0.5:  # messages in flight may be lost
                self.cuts.setdefault((worker.number, other), self.now)
        self.process_ends(worker, channel)

    def process_ends(self, worker: Worker, channel: Channel | None) -> None:
        if channel is not None:
            when = max(channel.up, self.now + self.delay())
            self.at(when - self.now, self.on_channel_closed, channel)
        self.at(self.delay(), self.on_process_ended, worker.number)
        self.report_silence(worker.number, 0.0)
        mates = [self.workers[w] for w in self.config.group_of(worker.number)]
        gone = all(mate.state in ("dead", "end") for mate in mates)
        # Launch a new group once all processes of the old one have ended.
        if self.replace and gone and all(m.cause in ("", "fenced") for m in mates):
            self.at(self.delay(20), self.launch)

    def report_silence(self, number: int, silence: float) -> None:
        for peer in self.workers.values():
            members = peer.members
            if members is not None and number in peer.history[members.epoch]:
                wait = silence * (0.8 + 0.2 * self.random()) + self.delay()
                self.at(wait, peer.on_peer_silent, number, members.epoch)

    def report_leave(self, number: int) -> None:
        for peer in self.workers.values():
            members = peer.members
            if members is not None and number in peer.history[members.epoch]:
                self.at(self.delay(), peer.on_peer_finished, number, members.epoch)

    def freeze(self) -> None:
        worker = self.choose()
        if worker is not None and not worker.frozen:
            worker.frozen = True
            self.at(
                self.random() * (0.05 if self.random() < 0.5 else 20), self.thaw, worker
            )
            self.report_silence(worker.number, FAILURE_TIMEOUT)

    def thaw(self, worker: Worker) -> None:
        worker.frozen = False
        if worker.state not in ("dead", "end"):
            for function, args in worker.deferred:
                self.at(0.0, function, *args)
        worker.deferred.clear()

    def separate(self) -> None:
        one, other = self.choose(), self.choose()
        if one is None or other is None or one is other:
            return
        a, b = one.number, other.number
        self.pairs |= {(a, b), (b, a)}
        for peer, number in ((one, b), (other, a)):
            self.cuts.setdefault((peer.number, number), self.now)
            if peer.members and number in peer.history[peer.members.epoch]:
                wait = FAILURE_TIMEOUT * (0.8 + 0.2 * self.random())
                self.at(wait, peer.on_peer_silent, number, peer.members.epoch)

    def crash(self) -> None:
        """Restarts the coordinator, which loses its state."""
        self.term += 1
        self.crashes += 1
        began = self.membership.phase != "assembly" or self.crashes > 1
        self.membership, self.present = JobMembership(self.config, began), {}
        self.tick_at = None
        for number in self.finished:  # the launcher remembers finished workers
            self.membership.mark_finished(number, self.now)
        for worker in self.workers.values():
            channel = worker.connection.channel
            if channel is not None:
                self.at(self.delay(), self.cut_off, worker, channel)
            elif (
                worker.number not in self.finished
                and worker.state == "dead"
                and self.random() < 0.5
            ):
                self.at(self.delay(), self.on_process_ended, worker.number)

    # --- the network ---

    def is_separated(self, one: int, other: int) -> bool:
        return (one, other) in self.pairs

    def is_silent(self, one: int, other: int) -> bool:
        """Whether worker `one` receives no heartbeats from worker `other`."""
        peer = self.workers[other]
        lost = peer.cause in ("fenced", "stopped")
        return (
            peer.state == "dead" or peer.frozen or lost or self.is_separated(one, other)
        )

    def schedule_observations(self, worker: Worker, others: tuple[int, ...]) -> None:
        """Schedules what a worker detects about its peers in a new epoch."""
        members = worker.members
        assert members is not None
        for other in others:
            peer = self.workers[other]
            if peer.state == "bye" or peer.cause == "finished":
                self.at(self.delay(), worker.on_peer_finished, other, members.epoch)
            elif other != worker.number and self.is_silent(worker.number, other):
                dead = self.workers[other].state in ("dead", "end")
                wait = (
                    self.delay()
                    if dead
                    else FAILURE_TIMEOUT * (0.8 + 0.2 * self.random())
                )
                self.at(wait, worker.on_peer_silent, other, members.epoch)

    def send_to_peers(
        self,
        call: Call,
        number: int,
        stage: dict[int, Any],
        arrivals: dict[tuple[int, int], float],
        then: str,
    ) -> None:
        """Sends from one rank to its peers. The last sender schedules the next stage.

        `stage` are the ranks that have sent, `then` is the method of the next stage.
        """
        order, now = call.comm.order, self.now
        if then == "complete" or self.wrong == "own ending":
            order = call.peers(number, self.group)
        for other in order:
            arrivals[number, other] = now if other == number else now + self.delay()
        if stage.keys() >= set(order):
            for other in order:
                when = max(arrivals[sender, other] for sender in order)
                self.at(when - now, getattr(self.workers[other], then), call)

    def is_lost(self, number: int, arrivals: dict[tuple[int, int], float]) -> bool:
        """Whether a message that this rank needs has been lost."""
        cuts = self.cuts
        return bool(cuts) and any(
            pair[1] == number and when > cuts.get(pair, when)
            for pair, when in arrivals.items()
        )

    def connect(self, worker: Worker) -> None:
        if worker.frozen:
            worker.deferred.append((self.connect, (worker,)))
        elif worker.state not in ("dead", "end"):
            worker.connection.channel = Channel(worker.number, self.term)
            worker.connection.send(worker.client.hello_message())

    def cut_off(self, worker: Worker, channel: Channel) -> None:
        if worker.frozen:
            worker.deferred.append((self.cut_off, (worker, channel)))
        elif worker.connection.channel is channel and worker.state != "dead":
            worker.connection.channel = None
            with worker.client._changed:
                worker.client.on_disconnected()
            self.at(self.delay(50), self.connect, worker)

    def send_up(self, channel: Channel, message: dict[str, Any]) -> None:
        channel.up = max(channel.up, self.now + self.delay())
        self.at(channel.up - self.now, self.receive_up, channel, message)

    def receive_up(self, channel: Channel, message: dict[str, Any]) -> None:
        if channel.term != self.term:
            return
        number = channel.worker
        if message["type"] == "hello":
            if number in self.present:
                self.membership.on_disconnected(number, "again", self.now)
            self.present[number] = channel
            self.membership.on_hello(number, "", {}, message["rejoin"], self.now)
        elif self.present.get(number) is channel:
            self.membership.on_message(number, message, self.now)
        self.deliver()

    def on_channel_closed(self, channel: Channel) -> None:
        if self.present.get(channel.worker) is channel:
            del self.present[channel.worker]
            self.membership.on_disconnected(channel.worker, "closed", self.now)
            self.deliver()

    def on_process_ended(self, number: int) -> None:
        self.membership.process_ended(number, "its process ended", self.now)
        self.deliver()

    def tick(self, term: int) -> None:
        if term == self.term:
            self.tick_at = None
            deadline = self.membership.deadline()
            if deadline is not None and deadline <= self.now:
                self.membership.tick(self.now)
            self.deliver()

    def deliver(self) -> None:
        messages, events = self.membership.drain()
        now = self.now
        for number, message, last in messages:
            channel = self.present.get(number)
            if channel is not None:
                channel.down = max(channel.down, now + self.delay())
                wait = channel.down - now
                self.at(wait, self.worker_receive, channel, message)
                if last:
                    del self.present[number]
        for event in events:
            if event[0] == "fenced" and (self.random() < 0.7 or self.group > 1):
                self.at(self.delay(10), self.kill, self.workers[event[1]])
            elif event[0] == "finished":
                self.finished.add(event[1])
            elif event[0] == "stop":
                self.stopped(event[1])
        deadline = self.membership.deadline()
        if deadline is not None and (self.tick_at is None or deadline < self.tick_at):
            self.tick_at = max(deadline, now)
            self.at(self.tick_at - now, self.tick, self.term)

    def worker_receive(self, channel: Channel, message: dict[str, Any]) -> None:
        worker = self.workers[channel.worker]
        if worker.state in ("dead", "end") or worker.connection.channel is not channel:
            return
        if worker.frozen:
            args = (channel, message)
            worker.deferred.append((self.worker_receive, args))
        else:
            worker.on_message(message)

    # --- used by workers ---

    def comm(self, epoch: int, order: tuple[int, ...]) -> SimulatedComm:
        key = (epoch, order)
        if key not in self.comms:
            self.comms[key] = SimulatedComm(epoch, order)
        return self.comms[key]

    def check_formation(self, epoch: int, order: tuple[int, ...]) -> None:
        """Checks that a coordinator announces one membership for an epoch."""
        known = self.formations.setdefault((self.crashes, epoch), order)
        if known != order and not self.crashes:
            raise Violation(f"I4: epoch {epoch} is {known} and {order}")
        finished = {w.number for w in self.workers.values() if w.state == "bye"}
        finished |= {w.number for w in self.workers.values() if w.cause == "finished"}
        finished |= self.membership._finished
        whole = self.config.complete_groups({*order, *finished})
        if not finished.issuperset(set(order) - set(whole)):
            raise Violation(f"I7: epoch {epoch} has parts of groups: {order}")

    def raises_error(self) -> bool:
        return self.raising > 0 and self.random() < self.raising

    def loses_inputs(self, worker: Worker) -> bool:
        """Whether the worker has lost the inputs of its call."""
        return self.failing > 0 and self.random() < self.failing

    def ended(self, worker: Worker, text: str) -> None:
        channel, worker.connection.channel = worker.connection.channel, None
        self.process_ends(worker, channel)

    # --- the checks ---

    def stopped(self, text: str) -> None:
        healthy = [
            worker.number
            for worker in self.workers.values()
            if worker.state not in ("dead", "end") and not worker.frozen
        ]
        if text.startswith("every rank has left"):
            # Newcomers do not keep the job alive, but members do, unless they were
            # asked to leave.
            epoch = self.membership.epoch
            remaining = set(epoch.order) - self.membership._outbox.fenced.keys()
            asked = [w.number for w in self.workers.values() if w.leaving]
            remaining.difference_update(*map(self.config.group_of, asked))
            if remaining:
                raise Violation(f"I3: stopped ({text}), but not {sorted(remaining)}")
            return
        if (
            len(self.config.complete_groups(healthy)) >= self.min_np
            and not self.crashes
        ):
            raise Violation(f"I3: stopped ({text}) with {healthy} alive")

    def check(self) -> None:
        # If the coordinator crashes while members finish, the last report of a member
        # may be lost. Then survivors repeat a call that this member has completed: the
        # last check for updates, whose result has no effect any more.
        known: dict[Any, Any] = {}
        ends: dict[tuple[int, int], int] = {}
        for worker in self.workers.values():
            if worker.state not in ("dead", "end"):
                raise Violation(f"I3: {worker.number} is blocked: {worker.state}")
            if worker.cause not in ("finished", "dismissed"):
                continue
            for key, value in worker.log.items():
                if self.crashes and key[0] == "check":
                    continue  # see above
                if known.setdefault(key, value) != value:
                    raise Violation(
                        f"I1: {key} is {value} on {worker.number}, elsewhere "
                        f"{known[key]}"
                    )
            if worker.cause == "finished":
                ends[worker.commit] = worker.number
                if worker.used != (1 << self.samples) - 1:
                    raise Violation(f"I6: {worker.number} used {worker.used:b}")
        if len(ends) > 1:
            raise Violation(f"I4: survivors end differently: {ends}")


def run(seed: int, wrong: str = "", group: int = 1) -> Simulation:
    """Simulates a job.

    Raises:
        Violation: if the job broke an invariant. The text contains the seed.
    """
    try:
        with wrong_rules.applied(wrong):
            simulation = Simulation(seed, wrong, group)
            simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
