"""What a host tells about itself, for the checks that compare hosts. No judgement."""

from __future__ import annotations

import glob
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ringjax.control import addresses

# Title of a column -> the distributions that it may come from.
DISTRIBUTIONS = {
    "ringjax": ("ringjax",),
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
_NET = Path("/sys/class/net")
_TUNNELS = ("tun", "wg", "tailscale", "ppp", "zt", "utun")


def versions() -> dict[str, str]:
    """Of everything that ranks must have alike; what is not there is left out."""
    found = {"Python": platform.python_version()}
    for title, names in DISTRIBUTIONS.items():
        for name in names:
            try:
                found[title] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    for file in glob.glob("/proc/driver/nvidia/version"):
        words = Path(file).read_text().split()
        found["driver"] = next((w for w in words if w[:1].isdigit() and "." in w), "?")
    return found


def machine() -> str:
    """What two processes of one host share; see `world.hello`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def interfaces() -> dict[str, dict[str, Any]]:
    """Of each interface with an address: addresses, mtu, whether it is a tunnel."""
    found = {}
    for name, places in addresses.by_interface().items():
        found[name] = {
            "addresses": places,
            "mtu": _mtu(name),
            "tunnel": name.startswith(_TUNNELS) or (_NET / name / "tun_flags").exists(),
        }
    return found


def _mtu(name: str) -> int:
    """Bytes of a packet; 0 if it is not known."""
    try:
        return int((_NET / name / "mtu").read_text())
    except (OSError, ValueError):
        return 0


def collect() -> dict[str, Any]:
    """All of it."""
    return {
        "hostname": socket.gethostname(),
        "machine": machine(),
        "python": sys.executable,
        "versions": versions(),
        "interfaces": interfaces(),
    }
