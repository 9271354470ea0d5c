"""The processes that a launcher has started, for `jax.distributed.initialize()`.

`ringjax.init` is not needed for that, and may follow. The processes meet as one group
of a job (groups.py), learn where the first process of the group has reserved a port for
JAX's coordinator, and leave the job at once.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from ringjax import runtime
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.launch_environment import LaunchInfo, detect_launch
from ringjax.errors import StartupError
from ringjax.membership.directives import EpochDirective
from ringjax.membership.rendezvous_discovery import join_job
from ringjax.world import groups
from ringjax.world.hello import create_hello, listening_hosts

# Reserves the port of JAX's coordinator, until this process ends.
_reserved: socket.socket | None = None


def find() -> LaunchInfo | None:
    """Returns rank and size of this process, or None if no launcher has set them.

    JAX itself knows some launchers. ringjax is asked about them if it carries JAX's
    collectives.

    Raises:
        StartupError: a launcher has started several processes, but rank or size is
            missing.
    """
    config = Config.from_env()
    info = detect_launch(config)
    known = info.size > 1 or config.size is not None or config.elastic
    return info if known else None


def local_rank() -> int | None:
    """Returns the rank among the processes of this host, if the launcher has set it."""
    return Config.from_env().local_rank


def coordinator_address() -> str:
    """Returns "host:port" for JAX's coordinator. All processes call this function.

    Raises:
        StartupError: some processes have not called it within the start timeout, or
            the processes of this job are no job of JAX: they form groups, or some may
            be lost and replaced.
    """
    global _reserved
    config = Config.from_env()
    _check_can_meet(config)
    info = detect_launch(config)
    if info.rank == 0:
        _reserved = groups.bind_free_port()
    port = 1 if _reserved is None else int(_reserved.getsockname()[1])
    if info.size == 1:
        return address.show(address.loopback(), port)
    hosts = listening_hosts(config, single_host=info.single_host)
    hello = create_hello(info.rank, info.size, replace(config, group_size=info.size))
    # Processes connect to the first one only, so the other ones' port does not matter.
    hello |= {
        "addresses": ",".join(address.show(host, port) for host in hosts),
        "group_port": port,
    }
    job = join_job(info, config, hello, lambda secret, name: {})
    try:
        first = job.client.first
        job.client.leave()
    finally:
        job.close()
    assert isinstance(first, EpochDirective)
    return groups.coordinator_address(first.group_addresses)


def _check_can_meet(config: Config) -> None:
    if runtime.is_initialized():
        raise StartupError(
            "jax.distributed.initialize: call it before ringjax.init(), or give it its "
            "arguments"
        )
    if config.group_size > 1:
        raise StartupError(
            "jax.distributed.initialize: RINGJAX_GROUP_SIZE is set, and ringjax.init() "
            "connects the processes of each group: call ringjax.init() instead"
        )
    if config.elastic:
        raise StartupError(
            "jax.distributed.initialize: this job is elastic, and jax.distributed can "
            "neither lose nor replace a process: start it by ringrun without --min-np, "
            "or with --group-size and call ringjax.init() instead"
        )
