"""Actors of Ray that are workers of a job: started, watched, ended.

What Ray says about an actor becomes a call of `EngineJob`, which knows the job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringjax.ray.worker import BaseHorovodWorker
from ringjax.run.engine_job import EngineJob

log = logging.getLogger("ringjax.ray")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SOON = 3.0  # a worker that failed after less than these seconds has failed soon
LONGEST_PAUSE = 30.0
_AFTER_FAILURE = 1.0  # seconds for the others to fail with a clear error of their own
_FENCED = 5.0  # seconds for a worker that was declared lost to end by itself
_LOOK = 0.1  # seconds between two looks at what the workers say


@dataclass(slots=True)
class Place:
    """Where actors of one kind are put.

    Attributes:
        resources: of each actor, as in Ray's `ScalingConfig.resources_per_worker`.
        group: with a bundle for each; None: anywhere.
        bundles: the bundle of each actor.
        strategy: Ray's scheduling strategy where there is no group.
        own: the group was made for them, and is removed with them.
    """

    resources: Mapping[str, float]
    group: PlacementGroup | None = None
    bundles: Sequence[int] = ()
    strategy: str = "DEFAULT"
    own: bool = False

    def start(self, index: int, env: Mapping[str, str]) -> Any:
        """A new actor, which Ray starts as soon as there is room."""
        options: dict[str, Any] = {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": {
                k: v for k, v in self.resources.items() if k not in ("CPU", "GPU")
            },
            "max_restarts": 0,  # a worker that starts again has another number
            "scheduling_strategy": self.strategy,
        }
        if env:
            options["runtime_env"] = {"env_vars": dict(env)}
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundles[index]
            )
        return ray.remote(BaseHorovodWorker).options(**options).remote()

    def remove(self) -> None:
        """Gives the group back, if it is ours."""
        if self.own and self.group is not None:
            remove_placement_group(self.group)


def group_for(
    bundles: Sequence[Mapping[str, float]], strategy: str, timeout: float
) -> PlacementGroup:
    """A placement group, with room for all of its bundles.

    Raises:
        TimeoutError: there is not enough room; it says what is free.
    """
    group = placement_group([dict(b) for b in bundles], strategy=strategy)
    if not group.wait(timeout):
        remove_placement_group(group)
        wanted = [dict(b) for b in bundles]
        raise TimeoutError(
            f"no room for the placement group within {timeout:g} s: {strategy} "
            f"{wanted}; the cluster has {_shown(ray.cluster_resources())}, of which "
            f"{_shown(ray.available_resources())} are free"
        )
    return group


def _shown(resources: Mapping[str, float]) -> str:
    kinds = {k: v for k, v in sorted(resources.items()) if not k.startswith("node:")}
    return ", ".join(f"{k}: {v:g}" for k, v in kinds.items()) or "nothing"


def current_group(resources: Mapping[str, float], count: int) -> Place | None:
    """The placement group that this process itself runs in, if it has the room."""
    group = get_current_placement_group()
    if group is None:
        return None
    bundles: list[int] = []
    for index, bundle in enumerate(group.bundle_specs):
        fits = [int(bundle.get(k, 0) // v) for k, v in resources.items() if v]
        bundles += [index] * (min(fits) if fits else count)
    if len(bundles) < count:
        raise ValueError(
            f"the current placement group has room for {len(bundles)} workers of "
            f"{_shown(resources)}, not for {count}"
        )
    return Place(resources, group, bundles[:count])


@dataclass(slots=True)
class Actor:
    """One actor.

    Attributes:
        handle: Ray's.
        pending: what is asked of it: where it is, and then the function's result.
        number: its worker's; None as long as it is not known where it runs.
    """

    handle: Any
    pending: Any
    number: int | None = None


def placed(
    place: Place, count: int, env: Mapping[str, str], timeout: float
) -> tuple[list[Any], list[str]]:
    """Actors that have started, those of a node one after the other.

    Returns:
        The actors, and the names of their nodes.

    Raises:
        TimeoutError: not all have started.
    """
    handles = [place.start(index, env) for index in range(count)]
    try:
        nodes = ray.get([h.node.remote() for h in handles], timeout=timeout)
    except GetTimeoutError:
        end(handles)
        raise TimeoutError(
            f"not all of {count} workers of {_shown(place.resources)} have started "
            f"within {timeout:g} s; {_shown(ray.available_resources())} are free"
        ) from None
    order = sorted(range(count), key=lambda i: (nodes.index(nodes[i]), i))
    return [handles[i] for i in order], [nodes[i] for i in order]


def end(handles: Sequence[Any]) -> None:
    """Kills actors; it is no matter whether they live."""
    for handle in handles:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(handle, no_restart=True)


def gather(
    job: EngineJob, calls: Mapping[Any, int], each: Callable[[], None] = lambda: None
) -> list[Any]:
    """The results of a static job, by rank.

    Args:
        job: knows who failed first.
        calls: Ray's references to the results -> the ranks.
        each: called some times a second.

    Raises:
        LaunchError: a rank has failed.
    """
    waiting = dict(calls)
    limit = math.inf
    while waiting and time.monotonic() < limit:
        done, _ = ray.wait(list(waiting), timeout=_LOOK)
        each()
        job.poll()
        for ref in done:
            settle(job, waiting.pop(ref), ref)
        if job.over and limit == math.inf:
            limit = time.monotonic() + _AFTER_FAILURE
    return job.results()


def settle(job: EngineJob, number: int, ref: Any) -> None:
    """Tells the job what became of a worker's call."""
    try:
        job.finished(number, ray.get(ref))
    except RayTaskError as error:  # its function has raised
        job.lost(number, _COLOURS.sub("", str(error)))
    except RayError as error:  # the actor or its node is gone
        job.lost(number, _gone(error), certain=type(error).__name__ == "ActorDiedError")


def _gone(error: RayError) -> str:
    """What Ray knows, in a line; it says much that is general."""
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    about = text.rpartition("Worker exit detail: ")[2] or text
    return f"its process or node is gone ({type(error).__name__}: {about[:300]})"


class Elastic:
    """An elastic job of actors, which are replaced while it runs.

    Args:
        sizes: least and most workers.
        place: what an actor needs.
        env: variables for all.
        call: makes the call of an actor, given its handle and its ticket.
        start_timeout: seconds for the least number of actors to be started.
        reset_limit: how often the members may change; None: without limit.
        each: called some times a second.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        place: Place,
        env: Mapping[str, str],
        call: Callable[[Any, Mapping[str, str]], Any],
        *,
        start_timeout: float,
        reset_limit: int | None = None,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        self._each = each
        self._least, self._most = sizes
        self._place, self._env, self._call = place, env, call
        self._start_timeout, self._reset_limit = start_timeout, reset_limit
        self._actors: list[Actor] = []
        self._numbers = 0
        self._failures = 0  # in a row, each soon after the start
        self._not_before = 0.0
        self._fenced: dict[int, float] = {}  # when they should have ended
        self.job: EngineJob | None = None

    def run(self) -> list[Any]:
        """Until the job is over; the results, by rank.

        Raises:
            LaunchError: it has failed.
            TimeoutError: there was no room for the least number of workers.
        """
        try:
            first = self._assemble()
            self.job = EngineJob(
                len(first),
                min_size=self._least,
                max_size=self._most,
                env=self._env,
                note=log.info,
            )
            self._begin(first, self.job)
            while not self.job.over:
                self._turn(self.job)
                self._each()
            return self.job.results()
        finally:
            end([actor.handle for actor in self._actors])
            if self.job is not None:
                self.job.close()

    def _start(self) -> None:
        handle = self._place.start(0, {})
        self._actors.append(Actor(handle, handle.node.remote()))

    def _assemble(self) -> list[tuple[Actor, str]]:
        """Those that can be started now; the rest stays asked for."""
        for _ in range(self._most):
            self._start()
        begin = time.monotonic()
        refs = [actor.pending for actor in self._actors]
        done: list[Any] = []
        while len(done) < self._least:
            if time.monotonic() > begin + self._start_timeout:
                raise TimeoutError(
                    f"{len(done)} of at least {self._least} workers of "
                    f"{_shown(self._place.resources)} have started within "
                    f"{self._start_timeout:g} s; the cluster has "
                    f"{_shown(ray.cluster_resources())}, of which "
                    f"{_shown(ray.available_resources())} are free"
                )
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=_LOOK)
        # The others come at about the same time, if they come.
        spent = time.monotonic() - begin
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=max(1.0, spent / 2))
        found = []
        for actor in [a for a in self._actors if a.pending in done]:
            try:
                found.append((actor, ray.get(actor.pending)))
            except RayError as error:
                log.warning("a worker did not start: %s", _gone(error))
                self._actors.remove(actor)
        nodes = [node for _, node in found]
        return sorted(found, key=lambda item: nodes.index(item[1]))

    def _begin(self, first: Sequence[tuple[Actor, str]], job: EngineJob) -> None:
        tickets = job.tickets([node for _, node in first])
        for number, (actor, _) in enumerate(first):
            actor.number = number
            actor.pending = self._call(actor.handle, tickets[number])
        self._numbers = len(first)

    def _turn(self, job: EngineJob) -> None:
        """Takes what Ray and the workers say, and asks for actors that are missing."""
        refs = [actor.pending for actor in self._actors]
        done, _ = ray.wait(refs, timeout=_LOOK) if refs else ([], [])
        if not refs:
            time.sleep(_LOOK)
        now = time.monotonic()
        self._fenced |= dict.fromkeys(job.poll(), now + _FENCED)
        for actor in [a for a in self._actors if a.number in self._fenced]:
            assert actor.number is not None
            if now > self._fenced[actor.number]:
                why = job.workers[actor.number].fenced
                job.lost(actor.number, f"declared lost: {why}")
                end([actor.handle])  # what it is asked for fails, then
        for actor in [a for a in self._actors if a.pending in done]:
            if actor.number is None:
                self._admit(actor, job)
            else:
                settle(job, actor.number, actor.pending)
                self._ended(actor, job)
        if self._reset_limit is not None and job.resets > self._reset_limit:
            job.stop(
                f"the members have changed {job.resets} times; the reset limit is "
                f"{self._reset_limit}"
            )
        if job.closing or job.over or time.monotonic() < self._not_before:
            return
        for _ in range(self._most - len(self._actors)):
            self._start()

    def _admit(self, actor: Actor, job: EngineJob) -> None:
        """A newcomer has started."""
        try:
            node = ray.get(actor.pending)
        except RayError as error:
            log.warning("a worker did not start: %s", _gone(error))
            self._drop(actor, soon=True)
            return
        actor.number, self._numbers = self._numbers, self._numbers + 1
        actor.pending = self._call(actor.handle, job.ticket(actor.number, node))

    def _ended(self, actor: Actor, job: EngineJob) -> None:
        assert actor.number is not None
        worker = job.workers[actor.number]
        failed = worker.state == "failed"
        if failed and not job.over:
            who = "no rank" if worker.rank is None else f"rank {worker.rank}"
            log.warning("worker %d (%s): %s", actor.number, who, worker.words)
        member_for = worker.ended - worker.joined if worker.rank is not None else 0.0
        self._drop(actor, soon=failed and member_for < SOON)

    def _drop(self, actor: Actor, *, soon: bool) -> None:
        """At once another one the first time, then after 1, 2, 4 ... 30 s."""
        end([actor.handle])
        self._actors.remove(actor)
        self._failures = self._failures + 1 if soon else 1
        if self._failures > 1:
            pause = min(LONGEST_PAUSE, 2.0 ** min(self._failures - 2, 10))
            self._not_before = time.monotonic() + pause
