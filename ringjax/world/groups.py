"""Groups of processes: JAX connects a group's processes, ringjax averages over groups.

Worker w belongs to group w // k, where k is the size of a group, and its index in that
group is w % k. In a static job, a worker's id is its rank. The processes with one index
form a *replica set*, which has one process of each group. All replica sets share one
communicator id, so that the compiled programs of a group are equal.
`xla/jax_distributed.py` makes JAX connect a group. `membership/` decides which ranks
are lost together.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ringjax.control import addresses as address
from ringjax.control.worker_address import WorkerAddress
from ringjax.errors import StartupError


def replicas(workers: Sequence[int], worker: int, group_size: int) -> list[int]:
    """Returns the ranks that have `worker`'s index in their groups; [] without groups.

    Example:
        >>> replicas([0, 1, 4, 5], 5, 2)
        [1, 3]
    """
    if group_size == 1:
        return []
    index = worker % group_size
    return [rank for rank, other in enumerate(workers) if other % group_size == index]


def bind_free_port() -> socket.socket:
    """Reserves a TCP port for JAX's coordinator, before the coordinator starts.

    A bound socket that does not listen prevents other programs from using the port, and
    SO_REUSEPORT lets the coordinator bind the port, too.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    return reserved


class Group:
    """The group of this process, and its replica set; both are empty without groups.

    Example:
        >>> group = Group(1)
        >>> group.check_job_size(3)
        >>> group.reserve_port(0), group.addresses, group.replicas
        ({}, (), [])
    """

    def __init__(self, size: int) -> None:
        self.size = size  # the number of processes in each group
        # The addresses of the processes of the group, by index.
        self.addresses: Sequence[WorkerAddress] = ()
        self.replicas: list[int] = []  # the ranks of the replica set
        self._port: socket.socket | None = None

    def check_job_size(self, size: int) -> None:
        """Raises StartupError if `size` is not a multiple of the group size."""
        if size % self.size:
            raise StartupError(
                f"RINGJAX_GROUP_SIZE is {self.size}, but the job has {size} processes: "
                f"start a multiple of {self.size}"
            )

    def reserve_port(self, worker: int) -> dict[str, int]:
        """Reserves a port for JAX's coordinator, in the first process of a group."""
        if self.size == 1 or worker % self.size:
            return {}
        self._port = bind_free_port()
        return {"group_port": int(self._port.getsockname()[1])}

    def join(self, addresses: Sequence[WorkerAddress], job_group_size: int) -> None:
        """Sets the addresses of the processes of this process's group, by index.

        Raises StartupError if the job uses groups of another size than this process.
        """
        if job_group_size != self.size:
            raise StartupError(
                f"RINGJAX_GROUP_SIZE is {self.size}, but the ranks of this elastic job "
                f"are lost and join in groups of {job_group_size}: start it by ringrun "
                f"--group-size {self.size}"
            )
        self.addresses = addresses

    def update(self, workers: Sequence[int], worker: int) -> list[int]:
        """Sets and returns `replicas`. `workers` has the worker id of each rank."""
        self.replicas = replicas(workers, worker, self.size)
        return self.replicas

    def close(self) -> None:
        """Releases the port that JAX's coordinator uses. Further calls do nothing."""
        if self._port is not None:
            self._port.close()


def coordinator_address(addresses: Sequence[WorkerAddress]) -> str:
    """Returns "host:port" of JAX's coordinator in the first process of a group."""
    first = addresses[0]
    if all(each.near for each in addresses):
        return address.show(address.loopback(), first.group_port)
    hosts = [host for host, _ in address.parse(first.addresses)]
    hosts = [host for host in hosts if not address.is_loopback(host)] or hosts
    # Prefer the address by which the job's coordinator knows the group's first process.
    host = min(hosts, key=lambda host: host != first.seen)
    return address.show(host, first.group_port)
