"""Initializes jax.distributed for the process group of this rank.

In a job of groups, JAX's programs span all processes of a group (`world/groups.py`).
`ringjax.init` calls this module when the members of the group, and the address of its
first process, are known. This module uses public names of JAX only.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from ringjax.errors import StartupError
from ringjax.world import groups
from ringjax.world.world import World

# gRPC reads the addresses of proxies from _PROXY_VARIABLES, and the hosts to reach
# without a proxy from the other two variables.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY, _NO_PROXY_OF_ALL = "no_grpc_proxy", "no_proxy"


def initialize_group(world: World, started: bool, *, place: int) -> None:
    """Calls ``jax.distributed.initialize`` in a job of groups; runs at each init.

    `started` says whether JAX's backends have been started already, and `place` is the
    index of this process in its group.
    """
    if not world.group.addresses:
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
    where = groups.coordinator_address(world.group.addresses)
    _bypass_proxy(where.rpartition(":")[0].strip("[]"))
    try:
        jax.distributed.initialize(
            where,
            size,
            place,
            # JAX's coordinator does not authenticate its clients, so let it listen on
            # this address only.
            coordinator_bind_address=where if place == 0 else None,
            initialization_timeout=max(1, int(world.config.start_timeout)),
            cluster_detection_method="deactivate",
        )
    # Catch all errors: JAX raises its own and built-in errors, for example TypeError if
    # this version of JAX lacks one of the arguments.
    except Exception as error:
        names = ", ".join(str(world.rank - place + i) for i in range(size))
        raise StartupError(
            f"the group of ranks {names} did not come together at {where}: {error}"
        ) from error
    world.group.close()


def _bypass_proxy(host: str) -> None:
    """Makes gRPC connect to JAX's coordinator on `host` without http_proxy."""
    if not any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return
    without = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY_OF_ALL, "")
    os.environ[_NO_PROXY] = f"{without},{host}".lstrip(",")


def _configure_jax() -> None:
    settings: Any = jax.config
    # Disable JAX's preemption service, which would catch SIGTERM: ringjax or the
    # program handles this signal.
    if "jax_enable_preemption_service" in settings.values:
        settings.update("jax_enable_preemption_service", False)
    if settings.values.get("jax_cpu_collectives_implementation") in (None, "", "none"):
        settings.update("jax_cpu_collectives_implementation", "gloo")


def _check_initialized(size: int, place: int) -> None:
    """Raises StartupError if jax.distributed was initialised for another group."""
    found = jax.process_count(), jax.process_index()
    if found != (size, place):
        raise StartupError(
            f"jax.distributed has been initialised as process {found[1]} of {found[0]},"
            f" but ringjax has this one as process {place} of a group of {size}; leave "
            "jax.distributed.initialize to ringjax.init()"
        )
