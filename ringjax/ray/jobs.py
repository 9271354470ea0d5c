"""`ringjax.ray.run`: a function as the ranks of one job, on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray.actors import no_callback
from ringjax.ray.elastic_jobs import ElasticJob
from ringjax.ray.ray_logger import DriverLogger
from ringjax.ray.static_jobs import StaticJob
from ringjax.ray.strategy import BaseStrategy
from ringjax.run.environ import own_settings


def is_client() -> bool:
    """Whether this process is a client (`ray://`) of a cluster, not a part of it."""
    return bool(ray.util.client.ray.is_connected())


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
        callbacks: get what ranks give to `ringjax.ray.ray_logger.log`.

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
        raise ValueError("reset_limit: only for elastic jobs; give (least, most)")
    if not ray.is_initialized():
        ray.init()
    needs = {"CPU": 1.0} if resources_per_worker is None else resources_per_worker
    options: dict[str, Any] = {
        "env": {**own_settings(), **(env or {})},
        "strategy": placement_strategy,
        "start_timeout": start_timeout,
    }
    if elastic:
        options |= {"sizes": (least, most), "reset_limit": reset_limit}
    else:
        options["size"] = least
    named = dict(kwargs or {})
    with DriverLogger(callbacks) as logger:
        options["queue"] = logger.queue

        def task(_: Any) -> Any:
            return fn(*args, **named)

        if not is_client():
            return _run(task, needs, options, logger.dispatch)
        remote = ray.remote(num_cpus=0, max_retries=0)(_run)
        ref = remote.remote(task, needs, options)
        try:
            return list(logger.wait_for(ref))
        except KeyboardInterrupt:
            ray.cancel(ref, force=True)  # and with it end the actors, which it owns
            raise


def _run(
    task: Callable[[Any], Any],
    needs: Mapping[str, float],
    options: dict[str, Any],
    each: Callable[[], None] = no_callback,
) -> list[Any]:
    if "sizes" in options:
        spread = options["strategy"] in ("SPREAD", "STRICT_SPREAD")
        options["strategy"] = "SPREAD" if spread else "DEFAULT"
        return ElasticJob(task, needs, each=each, **options).run()
    where = {"kind": options["strategy"], "timeout": options["start_timeout"]}
    job = StaticJob(BaseStrategy(needs, options["size"], **where), options["env"])
    try:
        return job.call(task, options["queue"], each, leave=True)
    finally:
        job.close()
