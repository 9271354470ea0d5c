"""Starts and ends actors of Ray, and reports their outcomes to an `EngineJob`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import RayError, RayTaskError

from ringjax.ray.ray_types import ActorHandle, ObjectRef, SchedulingStrategy
from ringjax.ray.worker import BaseHorovodWorker
from ringjax.run.engine_job import EngineJob

# Seconds between two polls of the `EngineJob`. Events of the job arrive through
# sockets, so `ray.wait` does not return when an event arrives.
POLL_INTERVAL = 0.1
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_Worker = ray.remote(BaseHorovodWorker)


def no_callback() -> None:
    """Does nothing; the default of the argument `on_poll` of jobs."""


def start_actor(
    resources: Mapping[str, float], strategy: SchedulingStrategy = "DEFAULT"
) -> ActorHandle:
    """Returns a new actor, which Ray starts as soon as the cluster has room.

    The resources are as in Ray's `ScalingConfig.resources_per_worker`.
    """
    custom = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
    return _Worker.options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=custom,
        max_restarts=0,  # a worker that starts again must have a new id
        scheduling_strategy=strategy,
    ).remote()


def kill_actors(handles: Sequence[ActorHandle]) -> None:
    """Kills actors, some of which may be dead already."""
    for handle in handles:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(handle, no_restart=True)


def count_free_slots(resources: Mapping[str, float]) -> int:
    """Returns how many actors with these resources the cluster may have room for.

    Ray may place fewer actors, because the free resources may be on different nodes.
    """
    free = ray.available_resources()
    slots = (free.get(k, 0) // v for k, v in resources.items() if v)
    return int(min(slots, default=1))


def describe_shortage(
    resources: Mapping[str, float], count: int, seconds: float
) -> str:
    """Returns the end of an error message: which resources `count` actors lack."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    able = sum(all(has.get(k, 0) >= v for k, v in resources.items()) for has in nodes)
    total, free = (
        {k: found.get(k, 0) for k in resources}
        for found in (ray.cluster_resources(), ray.available_resources())
    )
    needed = {k: v * count for k, v in resources.items()}
    missing = [
        format_resources({k: v - has[k] for k, v in needed.items() if v > has[k]})
        for has in (total, free)
    ]
    return (
        f"within {seconds:.3g} s; missing: {missing[0] or missing[1] or 'nothing'}; "
        f"the cluster has {format_resources(total)}, of which are free "
        f"{format_resources(free)}; {able} of its {len(nodes)} nodes "
        "are large enough for one"
    )


def format_resources(resources: Mapping[str, float]) -> str:
    """Formats resources for messages, as in ``CPU: 2, GPU: 1``."""
    return ", ".join(f"{k}: {v:g}" for k, v in sorted(resources.items()))


def record_outcome(job: EngineJob, number: int, ref: ObjectRef) -> None:
    """Reports the outcome of a worker's finished call to the job."""
    try:
        job.finished(number, ray.get(ref))
    except RayTaskError as error:  # the function of the worker has raised an error
        job.lost(number, _COLOURS.sub("", str(error)))
    except RayError as error:  # the actor or its node is lost
        # Only ActorDiedError proves that the process has ended. After other errors the
        # worker may still train on a node that the driver cannot reach.
        certain = type(error).__name__ == "ActorDiedError"
        job.lost(number, describe_loss(error), certain=certain)


def describe_loss(error: RayError) -> str:
    """Shortens Ray's error about a lost actor to a line without general advice."""
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    detail = text.rpartition("Worker exit detail: ")[2] or text
    return f"its process or node is gone ({type(error).__name__}: {detail[:300]})"
