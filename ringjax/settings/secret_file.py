"""Secrets, what they look like and how they are read from a file."""

from __future__ import annotations

import os
import stat

from ringjax.settings import parsers

# Shorter secrets could be guessed; ringrun makes 32 bytes.
MIN_SECRET_BYTES = 16
SECRET = parsers.hexadecimal(2 * MIN_SECRET_BYTES, exactly=False)


_TOKEN = 16  # the least letters of a token


def read(path: str) -> bytes:
    """The bytes of the job's secret in a file that only its owner may use.

    Raises:
        ValueError: it cannot be read, others may read it, or it holds no secret.
    """
    text = _private("RINGJAX_SECRET_FILE", path)
    try:
        return bytes.fromhex(SECRET(text))
    except ValueError:
        raise ValueError(
            f"RINGJAX_SECRET_FILE is {path!r}: expected a line of at least "
            f"{2 * MIN_SECRET_BYTES} hexadecimal digits (openssl rand -hex 32)"
        ) from None


def read_token(path: str) -> str:
    """What those must show who want the job's metrics; raises as `read`."""
    name = "RINGJAX_METRICS_TOKEN_FILE"
    text = _private(name, path)
    if len(text) < _TOKEN or not (text.isascii() and text.isalnum()):
        raise ValueError(
            f"{name} is {path!r}: expected a line of at least {_TOKEN} letters and "
            "digits (openssl rand -hex 32)"
        )
    return text


def _private(name: str, path: str) -> str:
    """The text in a file that only its owner may use; `name` is the variable's."""
    what = f"{name} is {path!r}:"
    try:
        # Not blocking: opening a pipe would otherwise wait for somebody to write.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{what} {error.strerror}") from None
    try:
        # Of the open file, so that it cannot be exchanged between check and use.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{what} not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"{what} it belongs to user {status.st_uid}, expected {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            raise ValueError(
                f"{what} others may use it (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); chmod 600 it"
            )
        return os.read(fd, 4096).strip().decode(errors="replace")
    finally:
        os.close(fd)
