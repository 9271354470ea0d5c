"""Lines on standard error, from any thread; a line that cannot be written is dropped.

Full disks, closed pipes and notebooks that have put something else in the place of
`sys.stderr` are no reason for a thread to end. Which lines are wanted is the caller's
matter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def line(text: str) -> None:
    """Writes a line, or nothing; never raises.

    Example:
        >>> line("[ringjax] info: written to standard error")
    """
    stream: TextIO | None = sys.stderr
    if stream is None:  # closed when the program was started
        return
    with contextlib.suppress(Exception):
        own = stream is sys.__stderr__
        if not own:
            stream.write(f"{text}\n")
            stream.flush()
            return
        # Not through its buffer: what cannot be written would stay there, and fail
        # again with every line, and with the exit code at last.
        stream.flush()
        os.write(stream.fileno(), f"{text}\n".encode(errors="replace"))
