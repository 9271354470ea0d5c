"""What a rank says about itself when it joins, and whether all ranks fit together."""

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

# What ranks must agree about for their links and algorithms to fit together.
_AGREED = ["ring_bytes", "tile_bytes", "tcp_streams", "algorithm", "calibrate"]
_AGREED += ["fusion_threshold", "group_fusion", "cache_capacity", "check_parameters"]
_AGREED += ["group_size"]


def hello(rank: int, size: int, config: Config) -> dict[str, Any]:
    """What the others shall know about this rank; where it listens is added later."""
    return {
        "rank": rank,
        "size": size,
        "version": _native.version(),
        "hostname": config.hostname or socket.gethostname(),
        "machine": _machine(),
        "shm": config.shm,
        "cuda": devices.count(config),
        "settings": {name: getattr(config, name) for name in _AGREED},
    }


def _machine() -> str:
    """Identifies the host for links: ranks of one host share memory and unix sockets.

    Ranks of two users, or of two user namespaces, are on two hosts that TCP connects.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "user")]
        return f"{boot} {spaces[0]} {spaces[1]} {os.geteuid()}"
    except OSError:
        return f"{socket.gethostname()} {os.geteuid()}"


def listening_hosts(config: Config, *, one_host: bool) -> list[str]:
    """Where this rank listens for the others.

    Raises:
        StartupError: the settings name an interface that is not there.
    """
    if one_host:
        return [address.loopback()]
    try:
        return address.of_interfaces(config.network_interfaces)
    except ValueError as error:
        raise StartupError(f"RINGJAX_NETWORK_INTERFACES: {error}") from None


def host_names(members: Sequence[Member]) -> list[str]:
    """Of each rank; ranks with the same one are on one host."""
    return [f"{m.hello.get('machine')} {m.hello.get('hostname')}" for m in members]


def check_agreement(members: Sequence[Member]) -> None:
    """Every rank sees all, so every rank raises the same.

    Raises:
        StartupError: they differ in a version or a setting that must be alike.
    """
    first = members[0].hello
    for member in members[1:]:
        if member.hello.get("version") != first.get("version"):
            raise StartupError(
                f"rank {member.rank} runs ringjax {member.hello.get('version')}, "
                f"rank 0 {first.get('version')}"
            )
        mine, theirs = first.get("settings", {}), member.hello.get("settings", {})
        for name in _AGREED:
            if mine.get(name) != theirs.get(name):
                raise StartupError(
                    f"RINGJAX_{name.upper()} must be alike on all ranks: it is "
                    f"{mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank "
                    f"{member.rank}"
                )
