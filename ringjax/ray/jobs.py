"""`ringjax.ray.run`: runs a function as the ranks of a job, on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray.actors import no_callback
from ringjax.ray.elastic_jobs import ElasticJob
from ringjax.ray.ray_logger import DriverLogger
from ringjax.ray.ray_types import Callbacks, Result, Task
from ringjax.ray.static_jobs import StaticJob
from ringjax.ray.strategy import BaseStrategy
from ringjax.run.environ import own_settings


def is_client() -> bool:
    """Returns whether this process is only a client (`ray://`) of a cluster."""
    return bool(ray.util.client.ray.is_connected())


def run(
    fn: Callable[..., Any],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    num_workers: int | tuple[int, int],
    resources_per_worker: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    placement_strategy: str = "PACK",
    spares: int = 0,
    start_timeout: float = 100.0,
    reset_limit: int | None = None,
    callbacks: Callbacks | None = None,
) -> list[Result]:
    """Runs a function as the ranks of one job, each in an actor of its own.

    With a pair of numbers the job is elastic. It begins with as many actors as the
    cluster has room for. Lost actors are replaced, and more actors join as the cluster
    grows, up to the second number. The function should use `ringjax.elastic.run`.

    Args:
        fn: the function; every actor calls `fn(*args, **kwargs)`.
        args, kwargs: the arguments, the same for every rank.
        num_workers: the number of ranks, or their smallest and greatest number.
        resources_per_worker: the resources of an actor, such as `{"GPU": 1}`; None
            means one CPU.
        env: environment variables for the ranks. The ranks also receive the RINGJAX_*
            variables of this process.
        placement_strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as in Ray. An
            elastic job has no placement group and only distinguishes SPREAD.
        spares: the number of further actors of an elastic job. They have called
            `ringjax.init` and `warm_up`, and wait until a rank is lost, whose place one
            of them takes at the next commit.
        start_timeout: seconds until the cluster must have room.
        reset_limit: the number of times that the members of an elastic job may change.
        callbacks: functions that receive the messages of `ringjax.ray.ray_logger.log`.

    Returns:
        The results of the ranks, in their order; in an elastic job, the results of the
        members at the end.

    Raises:
        LaunchError: a rank has failed; the text names the rank, the node and the error.
        TimeoutError: the cluster has no room; the text names the missing resources.
        ValueError: an argument cannot be used.

    Example:
        >>> import ringjax.ray
        >>> ringjax.ray.run(lambda x: x + 1, (1,), num_workers=2)  # doctest: +SKIP
        [2, 2]
    """
    elastic = not isinstance(num_workers, int)
    if isinstance(num_workers, int):
        min_size = max_size = num_workers
    else:
        min_size, max_size = num_workers
    if not 1 <= min_size <= max_size:
        raise ValueError(f"num_workers={num_workers}: expected 1 <= least <= most")
    if reset_limit is not None and not elastic:
        raise ValueError("reset_limit: only for elastic jobs; give (least, most)")
    if spares < 0 or (spares and not elastic):
        raise ValueError(
            f"spares={spares}: expected 0 or, in elastic jobs, more; give (least, most)"
        )
    if not ray.is_initialized():
        ray.init()
    resources = {"CPU": 1.0} if resources_per_worker is None else resources_per_worker
    options: dict[str, Any] = {
        "env": {**own_settings(), **(env or {})},
        "strategy": placement_strategy,
        "start_timeout": start_timeout,
    }
    if elastic:
        options |= {"sizes": (min_size, max_size), "spares": spares}
        options |= {"reset_limit": reset_limit}
    else:
        options["size"] = min_size
    named = dict(kwargs or {})
    with DriverLogger(callbacks) as logger:
        options["queue"] = logger.queue

        def task(_: None) -> Result:
            return fn(*args, **named)

        if not is_client():
            return _run(task, resources, options, logger.dispatch)
        # A client only sends calls to the cluster. A task in the cluster becomes the
        # driver.
        remote = ray.remote(num_cpus=0, max_retries=0)(_run)
        ref = remote.remote(task, resources, options)
        try:
            return list(logger.wait_for(ref))
        except KeyboardInterrupt:
            ray.cancel(ref, force=True)  # the actors end with the task that owns them
            raise


def _run(
    task: Task,
    resources: Mapping[str, float],
    options: dict[str, Any],
    on_poll: Callable[[], None] = no_callback,
) -> list[Result]:
    if "sizes" in options:
        spread = options["strategy"] in ("SPREAD", "STRICT_SPREAD")
        options["strategy"] = "SPREAD" if spread else "DEFAULT"
        return ElasticJob(task, resources, on_poll=on_poll, **options).run()
    strategy = BaseStrategy(
        resources,
        options["size"],
        placement=options["strategy"],
        timeout=options["start_timeout"],
    )
    job = StaticJob(strategy, options["env"])
    try:
        return job.call(task, options["queue"], on_poll, leave=True)
    finally:
        job.close()
