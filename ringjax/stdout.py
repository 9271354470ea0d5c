"""What a command prints for a reader who may leave early, as `| head` does.

A program's own output is none of our business: this is for ringjax's commands only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def until_closed() -> Iterator[None]:
    """Ends its block, and no more, when nobody reads standard output any longer.

    Example:
        >>> with until_closed():
        ...     print("a line")
        a line
    """
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when the interpreter ends.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
