"""Reads the secret of the job, and the access token of its metrics, from files.

The functions raise ValueError if the file cannot be read, if users other than its owner
may use it, or if its text has the wrong format.
"""

from __future__ import annotations

import os
import stat

from ringjax.settings import parsers

# Shorter secrets could be guessed. ringrun generates 32 bytes.
MIN_SECRET_BYTES = 16
_MIN_TOKEN_CHARS = 16
parse_secret = parsers.hexadecimal(2 * MIN_SECRET_BYTES, exactly=False)


def read_secret(path: str) -> bytes:
    """Reads the job's secret, which the file holds in hexadecimal digits."""
    text = _read_private("RINGJAX_SECRET_FILE", path)
    try:
        return bytes.fromhex(str(parse_secret(text)))
    except ValueError:
        raise ValueError(
            f"RINGJAX_SECRET_FILE is {path!r}: expected a line of at least "
            f"{2 * MIN_SECRET_BYTES} hexadecimal digits (openssl rand -hex 32)"
        ) from None


def read_token(path: str) -> str:
    """Reads the token that clients of the metrics must send."""
    name = "RINGJAX_METRICS_TOKEN_FILE"
    text = _read_private(name, path)
    if len(text) < _MIN_TOKEN_CHARS or not (text.isascii() and text.isalnum()):
        raise ValueError(
            f"{name} is {path!r}: expected a line of at least {_MIN_TOKEN_CHARS} "
            "letters and digits (openssl rand -hex 32)"
        )
    return text


def _read_private(variable: str, path: str) -> str:
    """Returns the text of a file. Raises ValueError if other users may use the file."""
    what = f"{variable} is {path!r}:"
    try:
        # Without O_NONBLOCK, opening a pipe waits until a process opens it for writing.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{what} {error.strerror}") from None
    try:
        # Check the open file: nobody can replace it between the check and the read.
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
