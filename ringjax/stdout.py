"""Lets commands print to a pipe whose reader may end early, such as `| head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def until_closed() -> Iterator[None]:
    """Context manager that ends its block quietly when standard output is closed.

    Example:
        >>> with until_closed():
        ...     print("a line")
        a line
    """
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        # Replace the pipe, because Python writes the rest of the buffer at the exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
