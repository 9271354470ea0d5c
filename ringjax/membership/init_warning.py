"""The warning that ringjax.init() prints once if it waits long for other ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class InitWarning:
    """Prints one line if a rank waits long until all ranks of its job have joined.

    Args:
        seconds: how long the rank waits before it prints the line; 0 disables the line.
        limit: seconds after which the rank stops waiting; a part of the printed text.

    Example:
        >>> warning = InitWarning(print, 0.0, 120.0)
        >>> warning.no_rendezvous("no answer")
        >>> warning = InitWarning(print, 1e-9, 120.0)
        >>> warning.missing_ranks("ranks 1, 3 of 4")
        has waited 1e-09 s in init for ranks 1, 3 of 4; it waits up to 120 s
    """

    def __init__(
        self, warn: Callable[[str], None], seconds: float, limit: float
    ) -> None:
        self._warn, self._seconds, self._limit = warn, seconds, limit
        self.due = time.monotonic() + seconds if seconds > 0 else math.inf

    def missing_ranks(self, ranks: str) -> None:
        """Prints the missing ranks, a text such as "ranks 1, 3 of 4".

        If the text is empty, another rank has printed the line for the whole job, so
        this rank prints no line.
        """
        if ranks:
            self._print(f"for {ranks}")
        self.due = math.inf

    def no_rendezvous(self, why: str) -> None:
        """Prints, if the rank has waited long enough, that no coordinator replies."""
        if time.monotonic() >= self.due:
            self._print(f"for the coordinator of its job ({why})")

    def _print(self, text: str) -> None:
        self.due = math.inf
        up_to = f"it waits up to {self._limit:g} s"
        self._warn(f"has waited {self._seconds:g} s in init {text}; {up_to}")


NO_WARNING = InitWarning(lambda text: None, 0.0, 0.0)
