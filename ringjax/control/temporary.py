"""The folders for temporary files of ringjax: records, credentials and sockets.

A container may have a read-only root file system without a folder for temporary files.
Only the credentials file is necessary, and only if no launcher passes credentials. Code
that uses other temporary files must work without the folder.
"""

from __future__ import annotations

import contextlib
import os
import stat

_MEMORY = "/dev/shm"


def folder() -> str:
    """Returns a folder where this process can create files, or "" if there is none.

    Example:
        >>> folder() == "" or os.path.isdir(folder())
        True
    """
    import tempfile  # slow to import, and ringrun should start quickly

    try:
        return tempfile.gettempdir()
    except OSError:
        return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else ""


def private_folder(base: str) -> str:
    """Returns the path of the folder of this user inside of `base`, such as /tmp."""
    return os.path.join(base, f"ringjax-{os.geteuid()}")


def open_private_folder(path: str, *, make: bool = False) -> int:
    """Returns a descriptor of a folder that only this user can use.

    Raises:
        PermissionError: `path` is no folder, or other users can use it. The error has
            no `strerror`.
        OSError: the folder cannot be made or opened.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    # In /tmp, another user could create this folder, or a symbolic link of this name,
    # first. So open the folder, and check the descriptor, which cannot be replaced.
    refusal = PermissionError(f"{path} must be a folder that only this user can use")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except (NotADirectoryError, PermissionError):
        raise refusal from None
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise refusal
    return fd
