"""The job's secret, what it looks like and how it is read from a file."""

from __future__ import annotations

import os
import stat

from ringjax.settings import parsers

# Shorter secrets could be guessed; ringrun makes 32 bytes.
MIN_SECRET_BYTES = 16
SECRET = parsers.hexadecimal(2 * MIN_SECRET_BYTES, exactly=False)


def read(path: str) -> bytes:
    """The bytes of the secret in a file that only its owner may use.

    Raises:
        ValueError: it cannot be read, others may read it, or it holds no secret.
    """
    try:
        # Not blocking: opening a pipe would otherwise wait for somebody to write.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"RINGJAX_SECRET_FILE is {path!r}: {error.strerror}") from None
    try:
        # Of the open file, so that it cannot be exchanged between check and use.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"RINGJAX_SECRET_FILE is {path!r}: not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"RINGJAX_SECRET_FILE is {path!r}: it belongs to user {status.st_uid}, "
                f"expected {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            raise ValueError(
                f"RINGJAX_SECRET_FILE is {path!r}: others may use it (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); chmod 600 it"
            )
        text = os.read(fd, 4096).strip()
    finally:
        os.close(fd)
    try:
        return bytes.fromhex(SECRET(text.decode()))
    except ValueError:
        raise ValueError(
            f"RINGJAX_SECRET_FILE is {path!r}: expected a line of at least "
            f"{2 * MIN_SECRET_BYTES} hexadecimal digits (openssl rand -hex 32)"
        ) from None
