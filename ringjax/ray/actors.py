"""Actors of Ray: where they are put, how they are started, what Ray says of them.

What becomes of a worker is told to an `EngineJob`, which knows the job.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)

from ringjax.ray.worker import BaseHorovodWorker
from ringjax.run.engine_job import EngineJob

# Seconds between two polls of the ringjax job, whose news do not come through Ray.
POLL_INTERVAL = 0.1
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_Worker = ray.remote(BaseHorovodWorker)


def no_callback() -> None:
    """What is done between two looks, if nobody wants anything."""


def start_actor(resources: Mapping[str, float], strategy: Any = "DEFAULT") -> Any:
    """A new actor, which Ray starts as soon as there is room.

    Args:
        resources: what it needs, as in Ray's `ScalingConfig.resources_per_worker`.
        strategy: Ray's scheduling strategy.
    """
    others = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
    return _Worker.options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=others,
        max_restarts=0,  # a worker that starts again has another number
        scheduling_strategy=strategy,
    ).remote()


def kill_actors(handles: Sequence[Any]) -> None:
    """Kills actors; it is no matter whether they live."""
    for handle in handles:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(handle, no_restart=True)


def create_group(
    bundle: Mapping[str, float], count: int, strategy: str, timeout: float
) -> PlacementGroup:
    """A placement group of `count` equal bundles, with room for all of them.

    Raises:
        TimeoutError: there is not enough room; it says what is missing.
    """
    group = placement_group([dict(bundle)] * count, strategy=strategy)
    if not group.wait(timeout):
        remove_placement_group(group)
        what = f"the placement group {strategy} of {count} x {format_resources(bundle)}"
        raise TimeoutError(
            f"no room for {what} {describe_shortage(bundle, count, timeout)}"
        )
    return group


def count_free_slots(needs: Mapping[str, float]) -> int:
    """For how many of these resources there is room in the cluster, at most."""
    free = ray.available_resources()
    return int(min((free.get(k, 0) // v for k, v in needs.items() if v), default=1))


def describe_shortage(needs: Mapping[str, float], count: int, seconds: float) -> str:
    """Why `count` times these resources were not to be had; ends a sentence."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    able = sum(all(has.get(k, 0) >= v for k, v in needs.items()) for has in nodes)
    total, free = (
        {k: found.get(k, 0) for k in needs}
        for found in (ray.cluster_resources(), ray.available_resources())
    )
    missing = [
        format_resources(
            {k: v * count - has[k] for k, v in needs.items() if v * count > has[k]}
        )
        for has in (total, free)
    ]
    return (
        f"within {seconds:.3g} s; missing: {missing[0] or missing[1] or 'nothing'}; "
        f"the cluster has {format_resources(total)}, of which are free "
        f"{format_resources(free)}; {able} of its {len(nodes)} nodes "
        "are large enough for one"
    )


def format_resources(resources: Mapping[str, float]) -> str:
    """Resources in words."""
    return ", ".join(f"{k}: {v:g}" for k, v in sorted(resources.items()))


def settle_call(job: EngineJob, number: int, ref: Any) -> None:
    """Tells the job what became of a worker's call."""
    try:
        job.finished(number, ray.get(ref))
    except RayTaskError as error:  # its function has raised
        job.lost(number, _COLOURS.sub("", str(error)))
    except RayError as error:  # the actor or its node is gone
        job.lost(
            number,
            describe_loss(error),
            certain=type(error).__name__ == "ActorDiedError",
        )


def describe_loss(error: RayError) -> str:
    """What Ray knows of a lost actor, in a line; it says much that is general."""
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    about = text.rpartition("Worker exit detail: ")[2] or text
    return f"its process or node is gone ({type(error).__name__}: {about[:300]})"
