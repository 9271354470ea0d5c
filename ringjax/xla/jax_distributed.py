"""Joins this process and the others of its group to one in JAX, at `ringjax.init`.

Who is in the group, and where its first process listens, ringjax knows by then; what
groups are for is told in `world/groups.py`. Uses what is public of JAX only.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from ringjax.errors import StartupError
from ringjax.world import groups
from ringjax.world.world import World

# Variables of gRPC: those that it asks for a proxy, and for what needs none.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY, _NO_PROXY_OF_ALL = "no_grpc_proxy", "no_proxy"


def initialize_group(world: World, started: bool, *, place: int) -> None:
    """Calls ``jax.distributed.initialize``, if there are groups; at every init.

    Args:
        world: has the processes of the group.
        started: whether JAX's backends have been started already.
        place: of this process in it.

    Raises:
        StartupError: it is too late, or the group did not come together.
    """
    if not world.group.members:
        return
    size = world.group.size
    if jax.distributed.is_initialized():
        _check_initialized(size, place)
        return
    if started:
        raise StartupError(
            "RINGJAX_GROUP_SIZE is set, but JAX has been used before ringjax.init(): a "
            "process can join its group only before JAX knows its devices; call "
            "ringjax.init() first"
        )
    _configure_jax()
    where = groups.coordinator_address(world.group.members)
    _bypass_proxy(where.rpartition(":")[0].strip("[]"))
    try:
        jax.distributed.initialize(
            where,
            size,
            place,
            # Not on other interfaces: JAX's coordinator knows no secret.
            coordinator_bind_address=where if place == 0 else None,
            initialization_timeout=max(1, int(world.config.start_timeout)),
            cluster_detection_method="deactivate",
        )
    except Exception as error:  # JAX's own, and ValueError for what a version lacks
        names = ", ".join(str(world.rank - place + i) for i in range(size))
        raise StartupError(
            f"the group of ranks {names} did not come together at {where}: {error}"
        ) from error
    world.group.close()


def _bypass_proxy(host: str) -> None:
    """JAX's coordinator is a neighbour; gRPC would go there through http_proxy."""
    if not any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return
    without = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY_OF_ALL, "")
    os.environ[_NO_PROXY] = f"{without},{host}".lstrip(",")


def _configure_jax() -> None:
    settings: Any = jax.config
    # SIGTERM is ringjax's and the program's matter, not JAX's.
    if "jax_enable_preemption_service" in settings.values:
        settings.update("jax_enable_preemption_service", False)
    if settings.values.get("jax_cpu_collectives_implementation") in (None, "", "none"):
        settings.update("jax_cpu_collectives_implementation", "gloo")


def _check_initialized(size: int, place: int) -> None:
    """Somebody has called it already; what for must be the same."""
    found = jax.process_count(), jax.process_index()
    if found != (size, place):
        raise StartupError(
            f"jax.distributed has been initialised as process {found[1]} of {found[0]},"
            f" but ringjax has this one as process {place} of a group of {size}; leave "
            "jax.distributed.initialize to ringjax.init()"
        )
