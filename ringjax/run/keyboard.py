"""What is typed, or piped into ringrun, for one of the ranks.

Ranks are in process groups of their own, which may not read from the terminal, and the
signals of its keys are for ringrun. So ringrun reads, and hands on through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import threading

_PIECE = 1 << 16


def connect(source: int = 0) -> int:
    r"""A descriptor from which comes what `source` has, until that ends.

    Example:
        >>> source, keys = os.pipe()
        >>> rank = connect(source)
        >>> os.write(keys, b"continue\n")
        9
        >>> os.read(rank, 99)
        b'continue\n'
        >>> os.close(keys)
        >>> os.read(rank, 99)
        b''
    """
    reader, writer = os.pipe()
    name = "ringrun-keyboard"
    thread = threading.Thread(target=_pass_on, args=(source, writer), name=name)
    thread.daemon = True  # it may wait for a key for ever
    thread.start()
    return reader


def _pass_on(source: int, writer: int) -> None:
    # The rank may end, or close its input, with something left to read.
    with open(writer, "wb", buffering=0) as pipe, contextlib.suppress(OSError):
        while piece := os.read(source, _PIECE):
            pipe.write(piece)
