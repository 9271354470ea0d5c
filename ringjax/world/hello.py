"""Hello: a rank's description of itself, which it sends to the coordinator.

The coordinator compares versions and settings (`assembly.mismatch`), and sends what
ranks need to know about each other (membership/member_table.py).
"""

from __future__ import annotations

import os
import socket
from typing import Any

from ringjax import _native
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.errors import StartupError
from ringjax.links import fabric
from ringjax.world import devices

# Settings that must be equal on all ranks: links and algorithms depend on them.
_COMMON_SETTINGS = (
    *("ring_bytes", "tile_bytes", "tcp_streams", "algorithm", "calibrate"),
    *("fusion_threshold", "group_fusion", "cache_capacity", "check_parameters"),
    *("group_size", "fabric_slot"),
)


def create_hello(rank: int, size: int, config: Config) -> dict[str, Any]:
    """Returns the hello of this rank, without the addresses on which it listens.

    Raises StartupError if RINGJAX_FABRIC names what this host does not have.
    """
    hostname = config.hostname or socket.gethostname()
    settings = {name: getattr(config, name) for name in _COMMON_SETTINGS}
    hello: dict[str, Any] = {}
    if fabric.is_wanted(config) and (size > 1 or config.elastic):
        found = fabric.find(config, f"rank {rank} on {hostname}")
        hello["fabric"] = found.hello()
    return hello | {
        "rank": rank,
        "size": size,
        "version": _native.version(),
        "hostname": hostname,
        "machine": _machine_id(),
        "shm": config.shm,
        "cuda": devices.count(config),
        "settings": settings | {"fabric": fabric.name_of(config) or "off"},
    }


def _machine_id() -> str:
    """Returns an id of the host: ranks with equal ids share memory and unix sockets.

    Ranks of different users, user namespaces or network namespaces have different ids,
    so that TCP connects them.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "user")]
        return f"{boot} {spaces[0]} {spaces[1]} {os.geteuid()}"
    except OSError:
        return f"{socket.gethostname()} {os.geteuid()}"


def listening_hosts(config: Config, *, single_host: bool) -> list[str]:
    """Returns the addresses on which this rank listens for other ranks."""
    if single_host:
        return [address.loopback()]
    try:
        return address.of_interfaces(config.network_interfaces)
    except ValueError as error:
        raise StartupError(f"RINGJAX_NETWORK_INTERFACES: {error}") from None
