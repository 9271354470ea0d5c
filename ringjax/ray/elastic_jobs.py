"""An elastic job of actors: those that are lost are replaced while it runs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ringjax.ray import actors, discovery
from ringjax.ray.actors import POLL_INTERVAL, no_callback
from ringjax.run.engine_job import EngineJob

log = logging.getLogger("ringjax.ray")
_SOON = 3.0  # a worker that failed after less than these seconds has failed soon
_TOGETHER = 10.0  # seconds between those that find room at the beginning
_FENCED = 5.0  # seconds for a worker that was declared lost to end by itself


@dataclass(slots=True, eq=False)
class _Actor:
    """One actor of an elastic job.

    Attributes:
        handle: Ray's.
        pending: what is asked of it: its place, and then the function's result.
        host: where it was told to be; "": anywhere.
        node: where it is; "": it has not started.
        number: its worker's, once it has a ticket.
        limit: when it should have ended; 0: it may go on.
    """

    handle: Any
    pending: Any
    host: str
    node: str = ""
    number: int = -1
    limit: float = 0.0


@dataclass(eq=False)
class ElasticJob:
    """An elastic job of actors, which are replaced while it runs.

    Args:
        fn: called as `fn(None)` in each.
        needs: resources of an actor.
        sizes: least and most workers.
        env: variables for all.
        strategy: Ray's scheduling strategy.
        start_timeout: seconds for the least number of actors to be started.
        reset_limit: how often the members may change; None: without limit.
        cooldown: least and longest seconds without a new actor, after several in a row
            have failed soon after their start; 1 and 30 by default.
        hosts: says how many may be where; None: Ray knows.
        queue: where `ray_logger.log` puts what it is given.
        each: called some times a second.
    """

    fn: Callable[[Any], Any]
    needs: Mapping[str, float]
    sizes: tuple[int, int]
    env: Mapping[str, str]
    start_timeout: float
    strategy: str = "DEFAULT"
    reset_limit: int | None = None
    cooldown: Sequence[float] | None = None
    hosts: discovery.HostDiscovery | None = None
    queue: Any = None
    each: Callable[[], None] = no_callback

    def __post_init__(self) -> None:
        self._task = ray.put(self.fn)
        self._least, self._most = self.sizes
        self._offered = {"": self._most} if self.hosts is None else {}
        self._ask_again = 0.0
        self._actors: list[_Actor] = []
        self._numbers = 0
        self._failures = 0  # in a row, each soon after the start
        self._not_before = 0.0
        self._last_words = ""  # of an actor that did not start

    def run(self) -> list[Any]:
        """Until the job is over; the results, by rank.

        Raises:
            LaunchError: it has failed.
            TimeoutError: there was no room for the least number of workers.
        """
        try:
            with self._begin() as job:
                while not job.over:
                    self._turn(job)
                return job.results()
        finally:
            actors.kill_actors([actor.handle for actor in self._actors])

    def _begin(self) -> EngineJob:
        """The job of those that can be started now; the rest stays asked for."""
        begin, enough = time.monotonic(), 0.0
        room = actors.count_free_slots(self.needs)
        while True:
            self._ask()
            for actor in self._heard_of():
                self._started(actor)
            there = [actor for actor in self._actors if actor.node]
            now = time.monotonic()
            if len(there) >= self._least:
                # The others come at about the same time, if there is room for them.
                enough = enough or now
                all_there = len(there) >= min(room, len(self._actors))
                if all_there or now > enough + _TOGETHER:
                    break
            elif now > begin + self.start_timeout:
                raise TimeoutError(
                    f"{len(there)} of at least {self._least} workers of "
                    f"{actors.format_resources(self.needs)} have started "
                    + actors.describe_shortage(
                        self.needs, self._least - len(there), now - begin
                    )
                    + f"; {self._last_words}" * bool(self._last_words)
                )
        nodes = [actor.node for actor in there]
        there.sort(key=lambda actor: nodes.index(actor.node))
        job = EngineJob(
            len(there),
            min_size=self._least,
            max_size=self._most,
            env=self.env,
            note=log.info,
        )
        for actor, ticket in zip(
            there, job.tickets([actor.node for actor in there]), strict=True
        ):
            self._call(actor, ticket)
        return job

    def _ask(self, job: EngineJob | None = None) -> None:
        """Has an actor in each place that is offered, as far as Ray can, or asks."""
        now = time.monotonic()
        if self.hosts is not None and now > self._ask_again:
            self._ask_again = now + discovery.DISCOVER_HOSTS_FREQUENCY_SECS
            try:
                self._offered = dict(self.hosts.find_available_hosts_and_slots())
            except Exception:  # a user's: may be out of order for a while
                log.exception("which hosts there are is not known; those from before")
        there: Counter[str] = Counter()
        for actor in list(self._actors):
            if there[actor.host] < self._offered.get(actor.host, 0):
                there[actor.host] += 1
                continue
            if job is not None and actor.number >= 0:
                job.lost(actor.number, "its host is not offered any more")
            self._drop(actor, soon=False)
        if now < self._not_before:
            return
        for host, slots in self._offered.items():
            needs = dict(self.needs) | ({f"node:{host}": 0.001} if host else {})
            room = min(slots - there[host], self._most - len(self._actors))
            for _ in range(room):
                handle = actors.start_actor(needs, self.strategy)
                self._actors.append(_Actor(handle, handle.host_and_gpus.remote(), host))

    def _heard_of(self) -> list[_Actor]:
        by_ref = {actor.pending: actor for actor in self._actors if actor.pending}
        if not by_ref:
            time.sleep(
                POLL_INTERVAL
            )  # no reference to wait for; the job is polled next
            return []
        done, _ = ray.wait(list(by_ref), timeout=POLL_INTERVAL)
        self.each()
        return [by_ref[ref] for ref in done]

    def _started(self, actor: _Actor) -> None:
        try:
            (actor.node, _), actor.pending = ray.get(actor.pending), None
        except RayError as error:
            self._last_words = f"a worker did not start: {actors.describe_loss(error)}"
            log.warning("%s", self._last_words)
            self._drop(actor, soon=True)

    def _call(self, actor: _Actor, ticket: Mapping[str, str]) -> None:
        actor.number, self._numbers = self._numbers, self._numbers + 1
        actor.handle.update_env_vars.remote(ticket)
        if self.queue is not None:
            actor.handle.set_queue.remote(self.queue)
        actor.pending = actor.handle.execute.remote(self._task, True)

    def _turn(self, job: EngineJob) -> None:
        """Takes what Ray and the workers say, and asks for actors that are missing."""
        heard = self._heard_of()
        now = time.monotonic()
        fenced = job.poll()
        for actor in list(self._actors):
            if actor.number in fenced:
                actor.limit = now + _FENCED
            if actor in heard and actor.number < 0:
                self._started(actor)
                if actor.node:
                    self._call(actor, job.ticket(self._numbers, actor.node))
            elif actor in heard:
                actors.settle_call(job, actor.number, actor.pending)
                self._ended(actor, job)
            elif actor.limit and now > actor.limit:
                why = job.workers[actor.number].fence_reason
                job.lost(actor.number, f"declared lost: {why}")
                self._ended(actor, job)
        if self.reset_limit is not None and job.resets > self.reset_limit:
            job.stop(
                f"the members have changed {job.resets} times; the reset limit is "
                f"{self.reset_limit}"
            )
        if not job.closing and not job.over:
            self._ask(job)

    def _ended(self, actor: _Actor, job: EngineJob) -> None:
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
        member_for = (
            worker.end_time - worker.join_time if worker.rank is not None else 0.0
        )
        self._drop(actor, soon=failed and member_for < _SOON)

    def _drop(self, actor: _Actor, *, soon: bool) -> None:
        """Another one at once the first time, then after more and more seconds."""
        actors.kill_actors([actor.handle])
        self._actors.remove(actor)
        self._failures = self._failures + 1 if soon else 0
        if self._failures > 1:
            least, longest = self.cooldown or (1.0, 30.0)
            pause = min(longest, least * 2.0 ** min(self._failures - 2, 10))
            self._not_before = time.monotonic() + pause
