"""ElasticJob: an elastic job of actors, which replaces lost actors while it runs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from ringjax.ray import actors
from ringjax.ray.actors import POLL_INTERVAL, no_callback
from ringjax.ray.discovery import DISCOVER_HOSTS_FREQUENCY_SECS, HostDiscovery
from ringjax.ray.ray_types import ActorHandle, ObjectRef, RayQueue, Result, Task
from ringjax.run.elastic.spares import GAVE_UP, MAX_FAILURES
from ringjax.run.engine_job import EngineJob
from ringjax.run.workers import Worker

log = logging.getLogger("ringjax.ray")
# A worker has failed early if it fails within these seconds after it became a member.
# The worker that replaces it would probably fail, too.
_EARLY = 3.0
# The seconds to wait for more actors after the smallest allowed number has started.
_GATHER_TIME = 10.0
# The seconds until a worker that the coordinator has declared lost is killed.
_FENCED_TIMEOUT = 5.0


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor of an elastic job.

    Attributes:
        pending: the reference to its pending call: first `host_and_gpus`, then the
            function of the job.
        host: the host on which the actor must start; "" for any host.
        node: the node on which the actor has started; "" before the start.
        number: the id of its worker; -1 before the actor has joined the job.
        deadline: the time at which the job kills the actor; 0 without a deadline.
    """

    handle: ActorHandle
    pending: ObjectRef
    host: str
    node: str = ""
    number: int = -1
    deadline: float = 0.0


@dataclass(eq=False)
class ElasticJob:
    """Runs a function in an elastic job of actors, and replaces lost actors.

    Args:
        fn: the function; each actor calls `fn(None)`.
        sizes: the smallest and the greatest number of workers.
        spares: the number of further actors that are ready, and wait until a worker is
            lost. They start after the job has begun. After three in a row have failed
            before they were ready, the job starts no more spares.
        start_timeout: seconds for the smallest number of actors to start.
        reset_limit: the number of times that the members may change; None means no
            limit.
        cooldown: the shortest and the longest pause, in seconds, before a new actor
            starts, after several actors in a row have failed early; 1 and 30 by
            default.
        discovery: decides how many actors start on which hosts. If it is None, Ray
            decides.
        queue: the queue into which `ray_logger.log` of the workers puts messages.
        on_poll: a function that is called several times a second.
    """

    fn: Task
    resources: Mapping[str, float]
    sizes: tuple[int, int]
    env: Mapping[str, str]
    start_timeout: float
    spares: int = 0
    strategy: str = "DEFAULT"
    reset_limit: int | None = None
    cooldown: Sequence[float] | None = None
    discovery: HostDiscovery | None = None
    queue: RayQueue = None
    on_poll: Callable[[], None] = no_callback

    def __post_init__(self) -> None:
        # The function is sent to the cluster once, not for each actor.
        self._task = ray.put(self.fn)
        self._min_size, self._max_size = self.sizes
        most = self._max_size + self.spares
        self._offered = {"": most} if self.discovery is None else {}
        self._next_discovery = 0.0
        self._actors: list[_Actor] = []
        self._numbers = 0
        self._early_failures = 0  # the number of early failures in a row
        self._spare_failures = 0  # the number of spares that failed in a row
        self._ready = 0  # the number of workers that have ever been ready to join
        self._pause_until = 0.0
        self._start_failure = ""  # the error of the last actor that did not start

    def run(self) -> list[Result]:
        """Runs the job until its end, and returns the results by rank."""
        try:
            with self._start_job() as job:
                while not job.over:
                    self._poll(job)
                return job.results()
        finally:
            actors.kill_actors([actor.handle for actor in self._actors])

    def _start_job(self) -> EngineJob:
        """Starts the job with the actors that have started.

        Actors that Ray has not started yet remain requested, and join the job later.
        """
        begin, enough_since = time.monotonic(), 0.0
        room = actors.count_free_slots(self.resources)
        while True:
            self._request_actors()
            for actor in self._wait_for_replies():
                self._record_start(actor)
            started = [actor for actor in self._actors if actor.node]
            now = time.monotonic()
            if len(started) >= self._min_size:
                # Actors that find room start at about the same time. A short wait for
                # these actors avoids a change of the members right after the start.
                enough_since = enough_since or now
                complete = len(started) >= min(room, len(self._actors))
                if complete or now > enough_since + _GATHER_TIME:
                    break
            elif now > begin + self.start_timeout:
                raise TimeoutError(
                    f"{len(started)} of at least {self._min_size} workers of "
                    f"{actors.format_resources(self.resources)} have started "
                    + actors.describe_shortage(
                        self.resources, self._min_size - len(started), now - begin
                    )
                    + f"; {self._start_failure}" * bool(self._start_failure)
                )
        # Sort by node, so that the ranks of a node follow each other.
        nodes = [actor.node for actor in started]
        started.sort(key=lambda actor: nodes.index(actor.node))
        job = EngineJob(
            len(started),
            min_size=self._min_size,
            max_size=self._max_size,
            env=self.env,
            note=log.info,
        )
        tickets = job.tickets([actor.node for actor in started])
        for actor, ticket in zip(started, tickets, strict=True):
            self._call(actor, ticket)
        return job

    def _request_actors(self, job: EngineJob | None = None) -> None:
        """Requests an actor for each offered slot; removes actors without a slot."""
        now = time.monotonic()
        if self.discovery is not None and now > self._next_discovery:
            self._next_discovery = now + DISCOVER_HOSTS_FREQUENCY_SECS
            try:
                self._offered = dict(self.discovery.find_available_hosts_and_slots())
            # The user's host discovery may fail for some time, for example if its
            # server is down.
            except Exception:
                log.exception("the discovery of hosts failed; the known hosts are used")
        used: Counter[str] = Counter()
        for actor in list(self._actors):
            if used[actor.host] < self._offered.get(actor.host, 0):
                used[actor.host] += 1
                continue
            if job is not None and actor.number >= 0:
                job.lost(actor.number, "its host is not offered any more")
            self._remove(actor, early=False)
        if now < self._pause_until:
            return
        most = self._max_size + (self.spares if job is not None else 0)
        for host, slots in self._offered.items():
            # Each node of Ray has 1.0 of a resource `node:<address>`. If an actor needs
            # a small part of this resource, Ray starts the actor on that node.
            here = {f"node:{host}": 0.001} if host else {}
            free = min(slots - used[host], most - len(self._actors))
            for _ in range(free):
                handle = actors.start_actor({**self.resources, **here}, self.strategy)
                self._actors.append(_Actor(handle, handle.host_and_gpus.remote(), host))

    def _wait_for_replies(self) -> list[_Actor]:
        """Waits for a short time, and returns the actors whose calls have ended."""
        by_ref = {actor.pending: actor for actor in self._actors if actor.pending}
        if not by_ref:
            # No call is pending, so there is nothing to wait for. The caller polls the
            # job next.
            time.sleep(POLL_INTERVAL)
            return []
        done, _ = ray.wait(list(by_ref), timeout=POLL_INTERVAL)
        self.on_poll()
        return [by_ref[ref] for ref in done]

    def _record_start(self, actor: _Actor) -> None:
        try:
            (actor.node, _), actor.pending = ray.get(actor.pending), None
        except RayError as error:
            self._start_failure = (
                f"a worker did not start: {actors.describe_loss(error)}"
            )
            log.warning("%s", self._start_failure)
            self._remove(actor, early=True)

    def _call(self, actor: _Actor, ticket: Mapping[str, str]) -> None:
        actor.number, self._numbers = self._numbers, self._numbers + 1
        actor.handle.update_env_vars.remote(ticket)
        if self.queue is not None:
            actor.handle.set_queue.remote(self.queue)
        actor.pending = actor.handle.execute.remote(self._task, True)

    def _poll(self, job: EngineJob) -> None:
        """Processes events of Ray and of the job, and requests missing actors."""
        replied = self._wait_for_replies()
        now = time.monotonic()
        fenced = job.poll()
        for actor in list(self._actors):
            if actor.number in fenced:
                actor.deadline = now + _FENCED_TIMEOUT
            if actor in replied and actor.number < 0:
                self._record_start(actor)
                if actor.node:
                    self._call(actor, job.ticket(self._numbers, actor.node))
            elif actor in replied:
                actors.record_outcome(job, actor.number, actor.pending)
                self._record_end(actor, job)
            elif actor.deadline and now > actor.deadline:
                why = job.workers[actor.number].fence_reason
                job.lost(actor.number, f"declared lost: {why}")
                self._record_end(actor, job)
        if self.reset_limit is not None and job.resets > self.reset_limit:
            job.stop(
                f"the members have changed {job.resets} times; the reset limit is "
                f"{self.reset_limit}"
            )
        if not job.closing and not job.over:
            self._request_actors(job)

    def _record_end(self, actor: _Actor, job: EngineJob) -> None:
        worker = job.workers[actor.number]
        failed = bool(worker.exit_code) and not worker.dismissed
        if failed and not job.over:
            who = "no rank" if worker.rank is None else f"rank {worker.rank}"
            log.warning(
                "worker %d (%s): %s",
                actor.number,
                who,
                worker.report or worker.exit_text,
            )
        if failed:
            self._count_failed_spare(worker, job)
        member_for = (
            worker.end_time - worker.join_time if worker.rank is not None else 0.0
        )
        self._remove(actor, early=failed and member_for < _EARLY)

    def _count_failed_spare(self, worker: Worker, job: EngineJob) -> None:
        """Counts a spare that failed before it was ready, as `Spares` of ringrun does.

        A worker is a spare if the job has all its members without it. The next spare
        would fail, too, if three in a row have failed by themselves.
        """
        ready = sum(each.ready for each in job.workers.values())
        if ready > self._ready:
            self._ready, self._spare_failures = ready, 0
        by_itself = worker.end_confirmed and not worker.ready and worker.rank is None
        if not by_itself or len(job.members) < self._max_size:
            return
        self._spare_failures += 1
        if self._spare_failures == MAX_FAILURES:
            self.spares = 0
            log.warning(GAVE_UP)

    def _remove(self, actor: _Actor, *, early: bool) -> None:
        """Kills an actor. After two early failures in a row, delays its replacement."""
        actors.kill_actors([actor.handle])
        self._actors.remove(actor)
        self._early_failures = self._early_failures + 1 if early else 0
        if self._early_failures > 1:
            shortest, longest = self.cooldown or (1.0, 30.0)
            # Limit the exponent, because the power would overflow.
            pause = min(longest, shortest * 2.0 ** min(self._early_failures - 2, 10))
            self._pause_until = time.monotonic() + pause
