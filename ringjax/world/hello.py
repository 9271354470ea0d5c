"""Hello: a rank's description of itself, which all ranks receive when it joins.

Every rank compares the hellos of all ranks, so all ranks raise equal errors if settings
or versions differ.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from ringjax import _native
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.member import Member
from ringjax.errors import StartupError
from ringjax.world import devices

# Settings that must be equal on all ranks: links and algorithms depend on them.
_COMMON_SETTINGS = (
    *("ring_bytes", "tile_bytes", "tcp_streams", "algorithm", "calibrate"),
    *("fusion_threshold", "group_fusion", "cache_capacity", "check_parameters"),
    "group_size",
)


def create_hello(rank: int, size: int, config: Config) -> dict[str, Any]:
    """Returns the hello of this rank, without the addresses on which it listens."""
    return {
        "rank": rank,
        "size": size,
        "version": _native.version(),
        "hostname": config.hostname or socket.gethostname(),
        "machine": _machine_id(),
        "shm": config.shm,
        "cuda": devices.count(config),
        "settings": {name: getattr(config, name) for name in _COMMON_SETTINGS},
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


def host_keys(members: Sequence[Member]) -> list[str]:
    """Returns a text for each rank. Ranks on one host have equal texts."""
    return [f"{m.hello.get('machine')} {m.hello.get('hostname')}" for m in members]


def check_hellos(members: Sequence[Member]) -> None:
    """Raises StartupError if a rank has another version or setting than rank 0."""
    first = members[0].hello
    for member in members[1:]:
        if member.hello.get("version") != first.get("version"):
            raise StartupError(
                f"rank {member.rank} runs ringjax {member.hello.get('version')}, "
                f"rank 0 {first.get('version')}"
            )
        expected = first.get("settings", {})
        found = member.hello.get("settings", {})
        if found == expected:  # the usual case, and much faster with many ranks
            continue
        for name in _COMMON_SETTINGS:
            if expected.get(name) != found.get(name):
                raise StartupError(
                    f"RINGJAX_{name.upper()} must be alike on all ranks: it is "
                    f"{expected.get(name)!r} on rank 0 and {found.get(name)!r} on rank "
                    f"{member.rank}"
                )
