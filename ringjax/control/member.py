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
        seen: the address from which the worker reached the coordinator. Other hosts can
            reach this address, but perhaps not the addresses in `hello`.
        hello: the description that the worker sent when it joined, as JSON.
        worker: the id of the worker. An elastic job never uses an id again; in other
            jobs the id is the rank.
    """

    rank: int
    seen: str
    hello: JsonObject
    worker: int = -1


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ranks: "rank 3", or "ranks 1, 2, 5 and 40 more"."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
