"""What a launcher needs of the coordinator of its elastic job.

The real one is ringjax/membership/coordinator.py; how it is run is in
coordinator_process.py.
"""

from __future__ import annotations

import queue
from typing import Any, Protocol


class Authority(Protocol):
    """Decides who is a member; `events` are described with the real one."""

    addresses: list[str]
    events: queue.SimpleQueue[tuple[Any, ...]]
    wakeup: int

    def start(self) -> None:
        """Begins to serve."""

    def close(self) -> None:
        """Ends it."""

    def clear(self) -> None:
        """Makes `wakeup` unreadable."""

    def tick(self, now: float) -> None:
        """Looks whether it is still there; after `clear`."""

    def lost(self, worker: int, text: str, heirs: bool = True) -> None:
        """A worker's process has ended; newcomers may begin afresh as its `heirs`."""

    def expected(self, worker: int) -> None:
        """A worker's process was started."""


def coordinator(*args: Any, **kwargs: Any) -> Authority:
    """Makes the real one, in a process of its own."""
    from ringjax.run.elastic.coordinator_process import CoordinatorProcess

    return CoordinatorProcess(*args, **kwargs)
