"""Groups of processes: JAX joins those of one to one, ringjax averages between groups.

Worker w belongs to group w // k and has place w % k in it; in a job whose ranks stay,
workers are ranks. One process of every group, at the same place, is a replica set: all
of them have one number, so that the programs of a group are the same. What JAX does
about it is in `xla/jax_distributed.py`, who is lost with whom in `membership/`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ringjax.control import addresses as address
from ringjax.control.member import Member
from ringjax.errors import StartupError
from ringjax.world.lanes import LANE

REPLICAS = 1 << 27  # the number of every replica set; process sets have lower ones
# In an elastic job a call of theirs ends when those of all have, so that all shards of
# a step have one membership: here the ranks tell each other. (No replica set has a
# lane.)
ENDING = REPLICAS | LANE


def replicas(workers: Sequence[int], worker: int, group_size: int) -> list[int]:
    """The ranks that have the same place in their groups as `worker`.

    Args:
        workers: by rank.

    Returns:
        None of them without groups.

    Example:
        >>> replicas([0, 1, 4, 5], 5, 2)
        [1, 3]
    """
    if group_size == 1:
        return []
    place = worker % group_size
    return [rank for rank, other in enumerate(workers) if other % group_size == place]


class Port:
    """A port of this machine that nobody else gets until it is used.

    For JAX's coordinator, which has to be told its port: it shares this one.

    Attributes:
        number: the port.

    Example:
        >>> port = Port()
        >>> port.number > 0
        True
        >>> port.close()
    """

    def __init__(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))  # and nobody listens there
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Gives it back. May be called twice."""
        self._socket.close()


class Group:
    """This process's group, and those like it in other groups.

    Args:
        size: of each group.

    Attributes:
        mates: the group, by place; nobody without groups.
        replicas: the ranks at this one's place in their groups; none without groups.

    Example:
        >>> group = Group(1)
        >>> group.check(3)
        >>> group.offer(0), group.mates, group.replicas
        ({}, (), [])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mates: Sequence[Member] = ()
        self.replicas: list[int] = []
        self._port: Port | None = None

    def check(self, size: int) -> None:
        """Raises StartupError if so many processes are not so many groups."""
        if size % self.size:
            raise StartupError(
                f"RINGJAX_GROUP_SIZE is {self.size}, but the job has {size} processes: "
                f"start a multiple of {self.size}"
            )

    def offer(self, worker: int) -> dict[str, int]:
        """For a hello: the first of a group has a port for JAX's coordinator."""
        if self.size == 1 or worker % self.size:
            return {}
        self._port = Port()
        return {"group_port": self._port.number}

    def meet(self, mates: Sequence[Member], theirs: int) -> None:
        """Takes the group of a process of an elastic job.

        Args:
            theirs: how many are lost and join together there.

        Raises:
            StartupError: this process is set to other groups.
        """
        if theirs != self.size:
            raise StartupError(
                f"RINGJAX_GROUP_SIZE is {self.size}, but the ranks of this elastic job "
                f"are lost and join in groups of {theirs}: start it by ringrun "
                f"--group-size {self.size}"
            )
        self.mates = mates if self.size > 1 else ()

    def renew(self, workers: Sequence[int], worker: int) -> list[int]:
        """These are the workers now, by rank; this process is `worker`.

        Returns:
            Its new `replicas`.
        """
        self.replicas = replicas(workers, worker, self.size)
        return self.replicas

    def close(self) -> None:
        """The port is used, or not needed any more. May be called twice."""
        if self._port is not None:
            self._port.close()


def coordinator(mates: Sequence[Member]) -> str:
    """Where the first process of a group has JAX's coordinator: "host:port".

    Args:
        mates: the group, by place.
    """
    first = mates[0]
    port = int(first.hello["group_port"])
    machines = {mate.hello.get("machine") for mate in mates}
    if len(machines) == 1:
        return address.show(address.loopback(), port)
    found = [host for host, _ in address.parse(str(first.hello["addresses"]))]
    found = [host for host in found if not address.is_loopback(host)] or found
    return address.show(min(found, key=lambda host: host != first.seen), port)
