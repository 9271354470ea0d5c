"""The placement of ranks, and lower bounds for collectives between hosts.

This module only computes. tests/support/namespaces.py makes the hosts, and
collectives.py runs jobs.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass

from support.namespaces import address

LOOPBACK = "loopback"
PORT = 29400  # the port of the rendezvous; each host has its own ports
_UNITS = {"mbit": 1e6, "gbit": 1e9}


def parse_size(text: str) -> int:
    """Parses `4096`, `64K` or `16M` to bytes, a multiple of 4."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    size = int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]] if match else 0
    if size == 0 or size % 4 != 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 64K or 16M")
    return size


def parse_rate(text: str) -> str | None:
    """Parses a rate in tc's notation: `1gbit`, `500mbit`; None for `none`."""
    if text != "none" and not re.fullmatch(r"[1-9]\d*[mg]bit", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate like 1gbit or none")
    return None if text == "none" else text


@dataclass(frozen=True)
class Layout:
    """The number of hosts, the ranks on each host, and the rate of a link.

    Loopback means two ranks on this host, with TCP between them instead of shared
    memory.
    """

    hosts: int
    ranks: int
    rate: str | None = None
    loopback: bool = False

    @staticmethod
    def parse(text: str) -> Layout:
        """Parses `loopback`, or `4x2` for 4 hosts with 2 ranks each."""
        if text == LOOPBACK:
            return Layout(2, 1, loopback=True)
        match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text)
        if match is None or int(match[1]) < 2:
            raise argparse.ArgumentTypeError(f"{text!r} is no layout like 4x2")
        return Layout(int(match[1]), int(match[2]))

    @property
    def size(self) -> int:
        return self.hosts * self.ranks

    @property
    def title(self) -> str:
        if self.loopback:
            return "2 ranks over loopback TCP, no shared memory"
        rate = self.rate or "links without a limit"
        return f"{self.hosts} hosts x {self.ranks}, {rate}"

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of a link in one direction, headers included."""
        if self.rate is None:
            return None
        return float(self.rate[:-4]) * _UNITS[self.rate[-4:]] / 8

    @property
    def ring(self) -> list[tuple[int, str]]:
        """The rank and the address of the first rank of each host."""
        if self.loopback:
            return [(0, "127.0.0.1"), (1, "127.0.0.1")]
        return [(host * self.ranks, address(host)) for host in range(self.hosts)]

    def crossing(self, collective: str, size: int, *, ring: bool = False) -> float:
        """Returns the least bytes over the busiest link in one direction.

        `size` is the size of the whole vector: the result of an allgather, or the input
        of a rank for an alltoall or a reducescatter. With `ring`, the bound is for a
        ring through all ranks, which loads every link as if each rank had a host of its
        own. Without `ring`, the bound is for algorithms that first work inside the
        hosts, and no algorithm is better: Patarasuk and Yuan, JPDC 69 (2009). The data
        of an alltoall are different for each rank, so both bounds are equal.
        """
        if collective == "broadcast":  # every host must receive all data
            return float(size)
        n = self.size if ring and collective != "alltoall" else self.hosts
        times = {"allreduce": 2, "alltoall": self.ranks}.get(collective, 1)
        return times * (n - 1) / n * size

    def bounds(self, collective: str, size: int) -> tuple[float, float] | None:
        """Returns the least seconds on a link: for a ring, and for any algorithm."""
        rate = self.bytes_per_second
        if rate is None:
            return None
        ring, least = (
            self.crossing(collective, size, ring=way) / rate for way in (True, False)
        )
        return ring, least

    def environment(self, rank: int, job: str, secret: str) -> dict[str, str]:
        """Returns the additional variables that make a process `rank`."""
        host, local = divmod(rank, self.ranks)
        place: dict[str, object] = {"RANK": rank, "SIZE": self.size, "JOB": job}
        place["CALIBRATE"] = "always"  # all layouts have the same host names
        env = {}
        if self.loopback:
            place |= {"LOCAL_RANK": rank, "LOCAL_SIZE": 2}
            place |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "SHM": 0}
        else:
            place |= {"LOCAL_RANK": local, "LOCAL_SIZE": self.ranks}
            place |= {"CROSS_RANK": host, "CROSS_SIZE": self.hosts}
            place |= {"HOSTNAME": f"host{host}", "SECRET": secret}
            env = {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
        if self.size > (os.cpu_count() or 1):
            # Limit the threads, because by default every rank uses all cores.
            single = "--xla_cpu_multi_thread_eigen=false"
            env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()
        return env | {f"RINGJAX_{name}": str(value) for name, value in place.items()}
