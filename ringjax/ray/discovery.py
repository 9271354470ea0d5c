"""Horovod's classes that decide which hosts an elastic job may use."""

from __future__ import annotations

import abc
import random
import time
from collections.abc import Mapping

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # seconds between two calls of a discovery


class HostDiscovery(abc.ABC):
    """Base class of objects that find hosts for an elastic job; Horovod's class."""

    @abc.abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Returns the number of workers that may start on each host.

        A host has the name that it has in Ray's resource `node:<host>`.
        """


class RayHostDiscovery(HostDiscovery):
    """Finds the nodes whose resources are enough for a worker.

    Args:
        use_gpu: whether a worker needs a GPU.
        cpus_per_slot, gpus_per_slot: the resources of a worker.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = 1,
    ) -> None:
        self._needs = {"CPU": cpus_per_slot, "GPU": use_gpu and (gpus_per_slot or 1)}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Returns the number of workers that fit into the resources of each live node.

        The resources are all that a node has, not only the free ones.
        """
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
    """Hides some nodes for an interval, and then others; for experiments.

    Args:
        min_hosts, max_hosts: the smallest and the greatest number of visible nodes.
        change_frequency_s: seconds between two changes.
        use_gpu, cpus_per_slot, gpus_per_slot: the resources of a worker.
        verbose, _graceful: accepted and ignored.
    """

    __test__ = False  # pytest must not collect this class

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = 1,
        verbose: object = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._limits, self._pause = (min_hosts, max_hosts), change_frequency_s
        self._last = time.monotonic()
        self._hidden: set[str] = set()

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Returns the visible nodes, like the base class."""
        hosts = super().find_available_hosts_and_slots()
        if time.monotonic() - self._last >= self._pause:
            self._last = time.monotonic()
            self._change(set(hosts))
        return {k: v for k, v in hosts.items() if k not in self._hidden}

    def _change(self, hosts: set[str]) -> None:
        self._hidden &= hosts
        visible = hosts - self._hidden
        fewest, most = self._limits
        few = len(visible) <= fewest
        shows_one = few or (len(visible) < most and random.random() < 0.5)
        candidates = self._hidden if shows_one else visible
        if candidates:
            self._hidden ^= {random.choice(sorted(candidates))}
