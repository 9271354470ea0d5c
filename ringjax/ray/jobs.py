"""`ringjax.ray.run`: a function as the ranks of one job, on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray import actors
from ringjax.ray.actors import Place
from ringjax.ray.ray_logger import Callbacks
from ringjax.run.engine_job import EngineJob


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int | tuple[int, int],
    resources_per_worker: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    placement_strategy: str = "PACK",
    start_timeout: float = 100.0,
    reset_limit: int | None = None,
    callbacks: Sequence[Callable[[Any], None]] | None = None,
) -> list[Any]:
    """Runs a function as the ranks of one job, each in an actor of its own.

    With a pair of numbers the job is elastic: it begins with as many actors as there is
    room for, lost ones are replaced, and more join as the cluster grows, up to the
    second number. The function should use `ringjax.elastic.run` then.

    Args:
        fn: called in every actor as `fn(*args, **kwargs)`.
        args, kwargs: its arguments, the same for every rank.
        num_workers: how many, or the least and the most.
        resources_per_worker: one CPU, unless it says something else: `{"GPU": 1}`.
        env: variables for the ranks; this process's RINGJAX_* are handed on anyway.
        placement_strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as in Ray; in an
            elastic job, which has no placement group, SPREAD or Ray's default.
        start_timeout: seconds for the cluster to have room.
        reset_limit: how often the members of an elastic job may change.
        callbacks: get what rank 0 gives to `ringjax.ray.ray_logger.log`.

    Returns:
        The results in the order of the ranks; in an elastic job of those that there
        are at the end.

    Raises:
        LaunchError: a rank failed; it names the rank, the node and the error.
        TimeoutError: the cluster has no room; it says for what.
        ValueError: an argument cannot be used.

    Example:
        >>> import ringjax.ray
        >>> ringjax.ray.run(lambda x: x + 1, (1,), num_workers=2)  # doctest: +SKIP
        [2, 2]
    """
    elastic = not isinstance(num_workers, int)
    least, most = (
        (num_workers, num_workers) if isinstance(num_workers, int) else num_workers
    )
    if not 1 <= least <= most:
        raise ValueError(f"num_workers={num_workers}: expected 1 <= least <= most")
    if reset_limit is not None and not elastic:
        raise ValueError(
            "reset_limit: only for elastic jobs; give (least, most) workers"
        )
    resources = dict(
        {"CPU": 1} if resources_per_worker is None else resources_per_worker
    )
    if not ray.is_initialized():
        ray.init()
    notices = Callbacks(callbacks)
    call = Call(fn, tuple(args), dict(kwargs or {}), notices.queue)
    try:
        if elastic:
            spread = placement_strategy in ("SPREAD", "STRICT_SPREAD")
            place = Place(resources, strategy="SPREAD" if spread else "DEFAULT")
            return actors.Elastic(
                (least, most),
                place,
                env or {},
                call,
                start_timeout=start_timeout,
                reset_limit=reset_limit,
                each=notices.serve,
            ).run()
        group = actors.group_for([resources] * least, placement_strategy, start_timeout)
        place = Place(resources, group, range(least), own=True)
        return _static(least, place, env or {}, call, start_timeout, notices)
    finally:
        notices.close()


class Call:
    """What each actor is asked to do."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: Any,
    ) -> None:
        self._queue = queue
        self._task = ray.put((fn, args, kwargs))  # once, however many actors

    def __call__(self, handle: Any, ticket: Mapping[str, str]) -> Any:
        """Asks an actor; returns Ray's reference to the result."""
        if self._queue is not None:
            handle.set_queue.remote(self._queue)
        return handle.call.remote(ticket, self._task)


def _static(
    size: int,
    place: Place,
    env: Mapping[str, str],
    call: Call,
    timeout: float,
    notices: Callbacks,
) -> list[Any]:
    handles: list[Any] = []
    try:
        handles, nodes = actors.placed(place, size, {}, timeout)
        with EngineJob(size, env=env) as job:
            tickets = job.tickets(nodes)
            calls = {call(h, tickets[n]): n for n, h in enumerate(handles)}
            return actors.gather(job, calls, notices.serve)
    finally:
        actors.end(handles)
        place.remove()
