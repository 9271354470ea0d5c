"""A function by which a program says what its time is for."""

from __future__ import annotations

import contextlib
from typing import Literal

from ringjax.world.time_spent import spent


def time_for(
    part: Literal["checkpoints", "other"],
) -> contextlib.AbstractContextManager[None]:
    """Counts a block of the program as time that makes no progress.

    The goodput line of ringrun, `ringjax top` and the metrics show the share of these
    blocks. Blocks inside of a block do not count again. Checkpoints of
    `ringjax.elastic.Checkpointer` and of orbax count without this function.

    Args:
        part: "checkpoints", or "other" for anything else, such as an evaluation.

    Raises:
        ValueError: `part` is neither.

    Example:
        >>> import ringjax
        >>> with ringjax.time_for("checkpoints"):
        ...     pass  # write a checkpoint
    """
    if part not in ("checkpoints", "other"):
        raise ValueError(
            f'ringjax.time_for: {part!r} is neither "checkpoints" nor "other"'
        )
    return spent.on(part)
