"""A rank as the others know it, and ranks in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Member:
    """A rank as all others know it.

    Attributes:
        seen: the address from which it reached the coordinator; it is known to work.
        hello: what it said about itself when it joined.
        worker: the number of its process: in an elastic job one that is never used
            again, else its rank.
    """

    rank: int
    seen: str
    hello: dict[str, Any]
    worker: int = -1


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a sentence: "rank 3", or "ranks 1, 2, 5 and 40 more"."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
