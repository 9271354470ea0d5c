"""Rank information: rank and size in the job, on the host and across hosts.

These values are computed from the host names of all ranks.
control/launch_environment.py reads this process's rank from the launcher's variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ringjax.config import Config


@dataclass(frozen=True)
class RankInfo:
    """The ranks and sizes of one process, as Horovod defines them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[int, ...]  # the host number of each rank of the world

    @property
    def homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({self.hosts.count(host) for host in set(self.hosts)}) == 1

    @staticmethod
    def from_hosts(
        rank: int, keys: Sequence[Hashable], config: Config | None = None
    ) -> RankInfo:
        """Computes the ranks and sizes of `rank` from a key of each rank's host.

        Values that are set in `config` replace the computed values.
        """
        numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        hosts = tuple(numbers[key] for key in keys)
        own_host = hosts[rank]
        local_rank = hosts[:rank].count(own_host)
        # The hosts that have a rank with this local rank, ordered by rank.
        sizes = Counter(hosts)
        cross = [h for h in numbers.values() if sizes[h] > local_rank]
        computed = {
            "local_rank": local_rank,
            "local_size": sizes[own_host],
            "cross_rank": cross.index(own_host),
            "cross_size": len(cross),
        }
        settings = {name: getattr(config, name, None) for name in computed}
        overrides = {name: v for name, v in settings.items() if v is not None}
        return RankInfo(rank=rank, size=len(hosts), hosts=hosts, **computed | overrides)

    @staticmethod
    def provisional(rank: int, size: int, config: Config) -> RankInfo:
        """Returns the values for a process that is not connected to other ranks yet."""
        return RankInfo(
            rank=rank,
            size=size,
            local_rank=config.local_rank or 0,
            local_size=config.local_size or 1,
            cross_rank=config.cross_rank or 0,
            cross_size=config.cross_size or 1,
            hosts=(0,) * size,
        )
