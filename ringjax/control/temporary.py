"""The folder in which ringjax makes temporary files: records of calls and sockets.

A container may have a read-only root and no folder for temporary files. What is written
there is a convenience, so the answer may be that there is no such folder.
"""

from __future__ import annotations

import os

_MEMORY = "/dev/shm"


def folder() -> str:
    """A folder where this process can make files; empty: there is none.

    Example:
        >>> folder() == "" or os.path.isdir(folder())
        True
    """
    import tempfile  # rarely needed, and ringrun is to start in a moment

    try:
        return tempfile.gettempdir()
    except OSError:
        return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else ""
