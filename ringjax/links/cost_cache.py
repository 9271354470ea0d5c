"""Stores the constants of the cost model in one file per network.

settings/measurement_cache.py reads and writes the files. A file with impossible values
counts as missing. calibration.py explains the constants.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringjax.settings import measurement_cache

Cost = dict[str, float]  # maps the name of each constant to seconds
# A description of a network as JSON. The hash of this JSON is the name of the file.
Network = Mapping[str, object] | list[str]

# The least and the largest plausible seconds, by the last word of a constant's name.
# Latencies reach from a memory access to a second, and bytes from 10 TB/s to 10 kB/s.
LIMITS = {"latency": (1e-8, 1.0), "message": (1e-9, 1.0), "byte": (1e-13, 1e-4)}
NAMES = tuple(f"{where}_{kind}" for kind in LIMITS for where in ("local", "remote"))
_KIND = "network"


def is_valid(cost: object) -> bool:
    """Returns whether `cost` contains all constants, with values within LIMITS."""
    if not isinstance(cost, dict) or cost.keys() != set(NAMES):
        return False
    limits = {name: LIMITS[name.partition("_")[2]] for name in NAMES}
    return all(
        isinstance(value, float) and limits[name][0] <= value <= limits[name][1]
        for name, value in cost.items()
    )


def path_of(folder: str, network: Network) -> str:
    return measurement_cache.path_of(folder, _KIND, network)


def read(folder: str, network: Network) -> Cost | None:
    """Reads the constants of a network. Returns None without a valid file."""
    cost = measurement_cache.read(folder, _KIND, network)
    return cost if is_valid(cost) else None


def write(folder: str, network: Network, cost: Mapping[str, float]) -> bool:
    """Writes the constants of a network. Returns False if the file is not writable."""
    return measurement_cache.write(folder, _KIND, network, dict(cost))
