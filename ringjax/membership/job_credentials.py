"""The credentials to join a job, and the file in which rank 0 publishes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from dataclasses import dataclass, field

from ringjax.control import addresses as address
from ringjax.control import temporary
from ringjax.control.launch_environment import LaunchInfo
from ringjax.errors import StartupError


@dataclass(frozen=True)
class JobCredentials:
    """The addresses, the secret and the job id that a rank needs to join a job.

    Attributes:
        addresses: the coordinator's addresses, "host:port,[v6]:port,...".
        secret: authenticates the ranks and the coordinator to each other.
        job: the id of the job, 16 hexadecimal digits.
    """

    addresses: str
    secret: bytes = field(repr=False)  # keep the secret out of logs and tracebacks
    job: str


def derive_job_id(identity: str, size: int) -> str:
    """Derives the id of a job from the name that its launcher has given it.

    Two users, or two jobs of different sizes, get different ids for the same name.
    """
    text = f"ringjax {os.geteuid()} {size} {identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class CredentialsFile:
    """The file in which rank 0 publishes the job credentials for the ranks of its host.

    The name of the file is derived from the launcher's identity of the job. Without an
    identity it is derived from the parent process, which the ranks of one job share.

    Attributes:
        hint: advice to append to errors; "" unless the name depends on the parent.
    """

    def __init__(self, info: LaunchInfo) -> None:
        identity = info.identity or f"parent {_parent_identity()}"
        self._absent = f"rank 0 of {info.size} ({info.launcher}) has not appeared"
        self.hint = (
            ""
            if info.identity
            else "; ranks started by different parents need the same RINGJAX_JOB"
        )
        self.path = f"{private_folder()}/{derive_job_id(identity, info.size)}.json"

    def write(self, credentials: JobCredentials) -> None:
        """Publishes the credentials atomically, readable by this user only.

        Raises:
            StartupError: the file cannot be written.
        """
        temporary_path = f"{self.path}.{os.getpid()}.{secrets.token_hex(4)}"
        text = json.dumps(
            {
                "addresses": credentials.addresses,
                "secret": credentials.secret.hex(),
                "job": credentials.job,
            }
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(temporary_path, flags, 0o600), "w") as file:
                file.write(text)
            os.rename(temporary_path, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary_path)
            raise StartupError(f"cannot write {self.path}: {error.strerror}") from error

    def credentials(self) -> JobCredentials:
        """Reads the credentials. Raises OSError if `read` returns None.

        The credentials may be those of a killed job, which has not removed the file.
        """
        credentials = self.read()
        if credentials is None:
            raise OSError(self._absent)
        return credentials

    def read(self) -> JobCredentials | None:
        """Reads the credentials.

        Returns None if the file does not exist, if the file is malformed, or if another
        user could have written the file.
        """
        # O_NONBLOCK: opening a FIFO in the place of the file must not hang.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
            text = (
                os.read(fd, 4096) if private and stat.S_ISREG(status.st_mode) else b""
            )
        finally:
            os.close(fd)
        try:
            found = json.loads(text)
            secret, job = bytes.fromhex(found["secret"]), str(found["job"])
            bytes.fromhex(job)
            address.parse(found["addresses"])
            return JobCredentials(found["addresses"], secret, job)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def remove(self) -> None:
        """Removes the file, so that no later job uses these credentials."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def private_folder() -> str:
    """Makes the folder of this user for credentials files, and returns its path.

    Raises:
        StartupError: the folder cannot be made, or another user can use it.
    """
    base = _runtime_folder()
    if not base:
        raise StartupError(
            "there is no folder for temporary files, by which the ranks of this host "
            "find each other: set TMPDIR, or MASTER_ADDR and MASTER_PORT"
        )
    path = temporary.private_folder(base)
    try:
        os.close(temporary.open_private_folder(path, make=True))
    except OSError as error:
        why = f"cannot make {path}: {error.strerror}" if error.strerror else str(error)
        raise StartupError(why) from error
    return path


def _runtime_folder() -> str:
    """Returns XDG_RUNTIME_DIR if this user can write to it, else the temporary folder.

    After su or sudo, the variable may name a folder of another user. On a node whose
    job inherits the login node's environment, the folder may not exist.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        own = os.stat(base).st_uid == os.geteuid()
    except OSError:
        own = False
    return base if own and os.access(base, os.W_OK | os.X_OK) else temporary.folder()


def _parent_identity() -> str:
    """Returns the pid and start time of the parent process, because pids are reused."""
    pid = os.getppid()
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the command in parentheses. The command may contain
            # parentheses and spaces, so read the fields after the last ")".
            started = file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        started = ""
    return f"{pid} {started}"
