"""The file that remembers what a network is like: constants of the cost model, by key.

A file of `settings/measurement_cache.py` for each network; what is impossible counts as
unknown. What the constants mean is in calibration.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ringjax.settings import measurement_cache

Cost = dict[str, float]

# Seconds that are possible, by the last word of a constant's name. A message that waits
# takes from a memory access to a second, a byte from 10 TB/s to 10 kB/s.
LIMITS = {"latency": (1e-8, 1.0), "message": (1e-9, 1.0), "byte": (1e-13, 1e-4)}
NAMES = tuple(f"{where}_{what}" for what in LIMITS for where in ("local", "remote"))
_KIND = "network"


def is_sound(cost: object) -> bool:
    """Whether it has all constants and each one is possible."""
    if not isinstance(cost, dict) or cost.keys() != set(NAMES):
        return False
    return all(_is_possible(name, value) for name, value in cost.items())


def _is_possible(name: str, value: object) -> bool:
    low, high = LIMITS[name.partition("_")[2]]
    return isinstance(value, float) and math.isfinite(value) and low <= value <= high


def path_of(folder: str, network: Any) -> str:
    """The file of a network, which is described by anything that JSON can hold."""
    return measurement_cache.path_of(folder, _KIND, network)


def read(folder: str, network: Any) -> Cost | None:
    """What is known about a network, None if that is nothing."""
    cost = measurement_cache.read(folder, _KIND, network)
    return cost if is_sound(cost) else None


def write(folder: str, network: Any, cost: Mapping[str, float]) -> bool:
    """Remembers a network from now on; says whether that worked."""
    return measurement_cache.write(folder, _KIND, network, dict(cost))
