"""The description of a worker that all ranks receive, and rank lists as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]  # a JSON message, or a part of a message


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that has a rank in the current epoch.

    Attributes:
        worker: the id of the worker. An elastic job never uses an id again; in other
            jobs the id is the rank.
        host: the index of the worker's host. Hosts are numbered by their lowest ranks.
        shm: whether the worker shares memory with other workers of its host.
        cuda: the number of CUDA devices of the worker.
    """

    rank: int
    worker: int = -1
    host: int = 0
    hostname: str = ""
    shm: bool = False
    cuda: int = 0


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ranks: "rank 3", or "ranks 1, 2, 5 and 40 more"."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
