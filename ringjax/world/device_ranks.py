"""The ranks of one process in a world apart: one for each of the process's devices.

XLA calls a collective once for each device, on a thread of its own, and numbers the
members of a group by their devices. With a rank for each device, every collective is
what it is between processes of one device each: the devices of one process compare
their calls, and share memory, as those of different processes on one host do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ringjax import _native
from ringjax.config import Config
from ringjax.world.apart import WorldApart
from ringjax.world.key_value_store import KeyValueStore, StoreClient

T = TypeVar("T")
# The communicator for collectives, and the one for messages between pairs of ranks.
Pair = tuple[_native.Communicator, _native.Communicator]


class DeviceRanks:
    """The ranks of this process's devices, and their communicators.

    The ranks are numbered by process, and in a process by device. All processes make
    the object at the same time. The constructor raises as `WorldApart` does.

    Args:
        client: JAX's client of its key-value store.
        prefix: a prefix for keys in the store that nothing else uses.
        process: the index of this process.
        counts: the number of devices of each process.
        config: the settings.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        process: int,
        counts: Sequence[int],
        config: Config,
    ) -> None:
        owners = [p for p, count in enumerate(counts) for _ in range(count)]
        several = max(counts) > 1
        self.size = len(owners)

        def join(rank: int) -> WorldApart:
            store = KeyValueStore(
                client,
                rank,
                self.size,
                prefix,
                config.start_timeout,
                "device" if several else "process",
            )
            return WorldApart(store, config, owners if several else ())

        own = [rank for rank, owner in enumerate(owners) if owner == process]
        self._worlds: dict[int, WorldApart] = {}
        try:
            _at_the_same_time(
                lambda rank: self._worlds.setdefault(rank, join(rank)), own
            )
        except BaseException:
            self.close()
            raise

    def connect(self, ranks: Sequence[int]) -> dict[int, Pair]:
        """Connects the devices of a group. Returns the communicators of this process.

        The keys are the places of this process's devices in the group. All processes
        that have devices among `ranks` call it at the same time. Raises as
        `WorldApart.connect` does.
        """

        def connect(place: int) -> Pair:
            world = self._worlds[ranks[place]]
            # Messages between pairs are not numbered alike on all ranks, as calls are.
            return world.connect(ranks), world.connect(ranks, "messages")

        own = [place for place, rank in enumerate(ranks) if rank in self._worlds]
        return dict(zip(own, _at_the_same_time(connect, own), strict=True))

    def close(self) -> None:
        """Leaves the world. The first rank, which may hold its server, does so last."""
        for _, world in sorted(self._worlds.items(), reverse=True):
            world.close()

    def close_in_child(self) -> None:
        """Closes the copies of the sockets in a forked child."""
        for world in self._worlds.values():
            world.close_in_child()


def _at_the_same_time(
    function: Callable[[int], T], values: Sequence[int]
) -> Iterable[T]:
    """Returns the results for all values; ranks wait for each other in `function`.

    Returns or raises when all calls have ended. If several have raised an error, it
    raises the first one.
    """
    if len(values) == 1:
        return [function(values[0])]
    with ThreadPoolExecutor(len(values), "ringjax-device") as pool:
        futures = [pool.submit(function, value) for value in values]
    return [future.result() for future in futures]
