"""The folder for temporary files of ringjax: records of calls, and sockets.

A container may have a read-only root file system without such a folder. Training does
not need these files, so their users must work without the folder.
"""

from __future__ import annotations

import os

_MEMORY = "/dev/shm"


def folder() -> str:
    """Returns a folder where this process can make files; "" if there is none.

    Example:
        >>> folder() == "" or os.path.isdir(folder())
        True
    """
    import tempfile  # slow to import, and ringrun should start quickly

    try:
        return tempfile.gettempdir()
    except OSError:
        return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else ""
