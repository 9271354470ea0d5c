"""Writes lines to standard error from any thread, and ignores errors.

Writing to a full disk, to a closed pipe, or to the `sys.stderr` of a notebook must not
end the thread with an exception.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def line(text: str) -> None:
    """Writes a line. Never raises.

    Example:
        >>> line("[ringjax] info: written to standard error")
    """
    stream: TextIO | None = sys.stderr
    if stream is None:  # standard error was closed when the program started
        return
    with contextlib.suppress(Exception):
        is_replaced = stream is not sys.__stderr__
        if is_replaced:
            stream.write(f"{text}\n")
            stream.flush()
            return
        # Bypass the stream's buffer: text that cannot be written would stay there, fail
        # again with every line, and change the exit code of the program at its end.
        stream.flush()
        os.write(stream.fileno(), f"{text}\n".encode(errors="replace"))
