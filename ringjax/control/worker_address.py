"""The addresses by which a worker can connect to another worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """How a worker can connect to another worker.

    Attributes:
        seen: the address from which the worker reached the coordinator. Other hosts can
            reach this address, but perhaps not `addresses`.
        addresses: "host:port" of the sockets on which the worker listens, with commas.
        door: the name of the unix socket on which the worker listens.
        near: whether both workers run on one machine, perhaps with different host
            names.
        group_port: the port of JAX's coordinator, if the worker is the first of a
            group; otherwise 0.
    """

    seen: str
    addresses: str
    door: str = ""
    near: bool = False
    group_port: int = 0

    def to_json(self) -> list[Any]:
        return [self.seen, self.addresses, self.door, self.near, self.group_port]

    @staticmethod
    def from_json(entries: Sequence[Any]) -> WorkerAddress:
        """Parses the result of `to_json`. Raises TypeError or ValueError."""
        seen, addresses, door, near, port = entries
        return WorkerAddress(
            str(seen), str(addresses), str(door), bool(near), int(port)
        )
