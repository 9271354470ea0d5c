"""A rank's coordinates: in the world, on its host, and of its host among the others.

Computed from the hosts' names of all ranks; not how the ranks were started
(control/launch_environment.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringjax.config import Config


@dataclass(frozen=True)
class Standing:
    """A rank's coordinates. `hosts` has the number of each world rank's host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[int, ...]

    @property
    def homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({self.hosts.count(host) for host in set(self.hosts)}) == 1

    @staticmethod
    def of(rank: int, names: Sequence[str], config: Config | None = None) -> Standing:
        """From the host's name of each rank; what the settings say is stronger."""
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        hosts = tuple(numbers[name] for name in names)
        mine = hosts[rank]
        local_rank = hosts[:rank].count(mine)
        # The hosts that have a process with my local rank, in the order of the ranks.
        cross = [h for h in numbers.values() if hosts.count(h) > local_rank]
        computed = {
            "local_rank": local_rank,
            "local_size": hosts.count(mine),
            "cross_rank": cross.index(mine),
            "cross_size": len(cross),
        }
        given = {name: getattr(config, name, None) for name in computed}
        stronger = {name: v for name, v in given.items() if v is not None}
        return Standing(rank=rank, size=len(hosts), hosts=hosts, **computed | stronger)

    @staticmethod
    def provisional(rank: int, size: int, config: Config) -> Standing:
        """Of a rank that does not know the others yet, by what the settings say."""
        return Standing(
            rank=rank,
            size=size,
            local_rank=config.local_rank or 0,
            local_size=config.local_size or 1,
            cross_rank=config.cross_rank or 0,
            cross_size=config.cross_size or 1,
            hosts=(0,) * size,
        )
