"""Which hosts an elastic job may use, if it is not left to Ray: Horovod's classes."""

from __future__ import annotations

import abc
import random
import time
from collections.abc import Mapping
from typing import Any

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # between two questions to a discovery


class HostDiscovery(abc.ABC):
    """What you derive a discovery of your own from; Horovod's class."""

    @abc.abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Host, as in Ray's resource `node:<host>`, -> how many workers it may have."""


class RayHostDiscovery(HostDiscovery):
    """The nodes that have room for a whole worker, counted in workers.

    Args:
        use_gpu: whether a worker needs a GPU.
        cpus_per_slot, gpus_per_slot: what it needs.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = 1,
    ) -> None:
        self._needs = {"CPU": cpus_per_slot, "GPU": use_gpu and (gpus_per_slot or 1)}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Address of each living node -> workers that fit into all it has."""
        import ray

        found: dict[str, int] = {}
        for node in ray.nodes():
            if node["alive"]:
                has = node["Resources"]
                needs = [(k, v) for k, v in self._needs.items() if v]
                slots = min((int(has.get(k, 0) // v) for k, v in needs), default=1)
                if slots:
                    name = node["NodeManagerAddress"]
                    found[name] = found.get(name, 0) + slots
        return found


class TestDiscovery(RayHostDiscovery):
    """For trials: conceals nodes, another one every so many seconds.

    Args:
        min_hosts, max_hosts: how many it lets be seen.
        change_frequency_s: seconds between two changes.
        use_gpu, cpus_per_slot, gpus_per_slot: what a worker needs.
        verbose, _graceful: without effect.
    """

    __test__ = False  # in words of pytest

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = 1,
        verbose: Any = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._limits, self._pause = (min_hosts, max_hosts), change_frequency_s
        self._last = time.monotonic()
        self._concealed: set[str] = set()

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """As its base class, without the nodes that are concealed now."""
        hosts = super().find_available_hosts_and_slots()
        if time.monotonic() - self._last >= self._pause:
            self._last = time.monotonic()
            self._change(set(hosts))
        return {k: v for k, v in hosts.items() if k not in self._concealed}

    def _change(self, hosts: set[str]) -> None:
        self._concealed &= hosts
        seen = hosts - self._concealed
        least, most = self._limits
        shows = len(seen) <= least or (len(seen) < most and random.random() < 0.5)
        some = self._concealed if shows else seen
        if some:
            self._concealed ^= {random.choice(sorted(some))}
