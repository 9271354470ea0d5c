"""How ranks find the coordinator of their job, also where ringrun has not told them.

Then rank 0 runs it itself. On one host it leaves the address and a fresh secret in a
file that only this user can read; between hosts it takes a port that every rank can
compute, and the secret must be given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control import temporary
from ringjax.control.launch_environment import Place
from ringjax.errors import StartupError
from ringjax.membership.client import CoordinatorClient, Patience, Ticket, join
from ringjax.membership.coordinator import Coordinator

_FIRST_PORT, _PORTS = 61000, 4500  # above what Linux gives away by itself
# Launchers whose batch script needs no secret.
_NO_SECRET = {"Slurm": "; or run ringrun in the batch script, which needs none"}
# Takes the secret and the job's id, returns what others must know about this rank.
OpenDoors = Callable[[bytes, str], dict[str, Any]]

_ATTEMPTS = 4  # neighbouring ports, in case another job sits on the first


@dataclass
class Meeting:
    """A job that has come together.

    Attributes:
        coordinator: if it runs in this process.
    """

    client: CoordinatorClient
    secret: bytes = field(repr=False)
    job: str
    coordinator: Coordinator | None = None

    def release(self) -> None:
        """In a forked child: closes the copies of the parent's sockets."""
        self.client.release()
        if self.coordinator is not None:
            self.coordinator.release()

    def close(self) -> None:
        """Leaves for good, and ends the coordinator if it is here."""
        self.client.close()
        if self.coordinator is not None:
            self.coordinator.close()


def job_of(identity: str, size: int) -> str:
    """The id of a job from what its engine calls it."""
    text = f"ringjax {os.geteuid()} {size} {identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def issue(
    place: Place, config: Config, notice: Notice | None
) -> tuple[Ticket, Coordinator]:
    """Rank 0's part when there is no ringrun: starts the coordinator.

    Args:
        notice: tells the other ranks of this host; None: they are on other hosts, too.

    Raises:
        StartupError: it cannot be started, or a secret must be set first.
    """
    if notice is not None:
        secret, job = secrets.token_bytes(32), secrets.token_hex(8)
        hosts, ports = [address.loopback()], [0]
    else:
        secret, job = _given_secret(place, config), _job(place, config)
        hosts = address.of_interfaces(config.network_interfaces)
        ports = _ports(place)
    failure: StartupError | None = None
    for port in ports:
        try:
            coordinator = Coordinator(
                secret,
                job,
                np=place.size,
                on_loss="stop",
                hosts=hosts,
                port=port,
                start_timeout=config.start_timeout,
                tls=config.tls,
            )
        except StartupError as error:
            failure = error
            continue
        ticket = Ticket(",".join(coordinator.addresses), secret, job)
        try:
            if notice is not None:
                notice.write(ticket)
        except BaseException:
            coordinator.close()
            raise
        coordinator.start()
        return ticket, coordinator
    assert failure is not None
    raise failure


def attend(
    place: Place,
    config: Config,
    hello: dict[str, Any],
    open_doors: OpenDoors,
    say: Callable[[str], None] = lambda text: None,
) -> Meeting:
    """Joins the job, wherever its coordinator is, and waits for all ranks.

    Args:
        hello: what the others shall know about this rank.
        open_doors: called with the secret and the job before this rank joins; what it
            returns is added to the hello.
        say: shows a line about a wait that is long.

    Raises:
        StartupError: the job did not come together; the text says who is missing, or
            what to set.
    """
    notice = Notice(place) if place.one_host and not config.rendezvous else None
    coordinator: Coordinator | None = None
    ticket: Ticket | Callable[[], Ticket]
    if notice is not None and place.rank != 0:
        ticket = notice.ticket
    elif config.rendezvous or place.rank != 0:
        ticket = known_ticket(place, config)
    else:
        ticket, coordinator = issue(place, config, notice)
    opened: dict[Ticket, dict[str, Any]] = {}

    def greeting(ticket: Ticket) -> dict[str, Any]:
        if ticket not in opened:
            opened.clear()
            opened[ticket] = open_doors(ticket.secret, ticket.job)
        return hello | opened[ticket]

    try:
        client = join(
            ticket,
            place.rank if config.worker is None else config.worker,
            greeting,
            config.start_timeout,
            elastic_timeout=config.elastic_timeout if config.elastic else 0.0,
            failure_timeout=config.failure_timeout,
            patient=not config.rendezvous,
            hint="" if notice is None else notice.hint,
            tls=config.tls,
            patience=Patience(say, config.stall_warning, config.start_timeout),
        )
    except BaseException:
        if coordinator is not None:
            coordinator.close()
        raise
    finally:
        if coordinator is not None and notice is not None:
            # An error of `join` must not be replaced by one of removing the file.
            with contextlib.suppress(OSError, StartupError):
                notice.remove()
    [found] = opened
    return Meeting(client, found.secret, found.job, coordinator)


def _given_secret(place: Place, config: Config) -> bytes:
    try:
        secret = config.secret_bytes()
    except ValueError as error:
        raise StartupError(str(error)) from None
    if secret is None:
        raise StartupError(
            f"the job has {place.size} ranks ({place.source}) but no secret: set "
            f"RINGJAX_SECRET_FILE to a file that all of them can read and only you "
            f"(openssl rand -hex 32 > FILE; chmod 600 FILE), or RINGJAX_SECRET to what "
            f"is in it{_NO_SECRET.get(place.source, '')}"
        )
    return secret


def known_ticket(place: Place, config: Config) -> Ticket:
    """What the settings tell, or what every rank of the job computes alike.

    Raises:
        StartupError: they do not tell enough.
    """
    secret = _given_secret(place, config)
    if config.rendezvous:
        if not config.job:
            raise StartupError("RINGJAX_RENDEZVOUS is set but RINGJAX_JOB is not")
        return Ticket(config.rendezvous, secret, config.job)
    if not place.first_host:
        raise StartupError(
            f"{place.source} started {place.size} ranks on several hosts and does not "
            f"tell where rank 0 is: set MASTER_ADDR to the name of its host"
        )
    found = ",".join(address.show(place.first_host, port) for port in _ports(place))
    return Ticket(found, secret, _job(place, config))


def _job(place: Place, config: Config) -> str:
    return config.job or job_of(place.identity or place.first_host, place.size)


def _ports(place: Place) -> list[int]:
    first = place.ports[0] if place.ports else 0
    if not first:
        number = int(job_of(place.identity, place.size), 16)
        first = _FIRST_PORT + number % _PORTS
    return list(range(first, min(first + _ATTEMPTS, 65536)))


class Notice:
    """The file by which rank 0 tells the other ranks of this host where it listens."""

    def __init__(self, place: Place) -> None:
        # Without an identity from the engine: ranks of one job have one parent.
        identity = place.identity or f"parent {_parent()}"
        self._absent = f"rank 0 of {place.size} ({place.source}) has not appeared"
        self.hint = (
            ""
            if place.identity
            else "; ranks started by different parents need the same RINGJAX_JOB"
        )
        self.folder = private_folder()
        self.path = f"{self.folder}/{job_of(identity, place.size)}.json"

    def write(self, ticket: Ticket) -> None:
        """Appears at once or not at all, readable by this user only."""
        temporary = f"{self.path}.{os.getpid()}.{secrets.token_hex(4)}"
        text = json.dumps(
            {
                "addresses": ticket.addresses,
                "secret": ticket.secret.hex(),
                "job": ticket.job,
            }
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(temporary, flags, 0o600), "w") as file:
                file.write(text)
            os.rename(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise StartupError(f"cannot write {self.path}: {error.strerror}") from error

    def ticket(self) -> Ticket:
        """The ticket that `read` finds; raises OSError if rank 0 has left none."""
        ticket = self.read()  # perhaps what a dead job left behind
        if ticket is None:
            raise OSError(self._absent)
        return ticket

    def read(self) -> Ticket | None:
        """None if there is none, or it is not to be trusted."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
            text = os.read(fd, 4096) if ours and stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(fd)
        try:
            found = json.loads(text)
            secret, job = bytes.fromhex(found["secret"]), str(found["job"])
            bytes.fromhex(job)
            address.parse(found["addresses"])
            return Ticket(found["addresses"], secret, job)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def remove(self) -> None:
        """Afterwards nobody can mistake it for a later job's."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _of_session() -> str:
    """The folder that lasts as long as the user's session; or for temporary files.

    XDG_RUNTIME_DIR may name one that is not here, or another user's (su, sudo, the
    login node of a cluster).
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        own = os.stat(base).st_uid == os.geteuid()
    except OSError:
        own = False
    return base if own and os.access(base, os.W_OK | os.X_OK) else temporary.folder()


def private_folder() -> str:
    """Makes the folder in which the ranks of another launcher find their rendezvous.

    Raises:
        StartupError: the folder cannot be made, or another user can write to it.
    """
    base = _of_session()
    if not base:
        raise StartupError(
            "there is no folder for temporary files, by which the ranks of this host "
            "find each other: set TMPDIR, or MASTER_ADDR and MASTER_PORT"
        )
    path = os.path.join(base, f"ringjax-{os.geteuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StartupError(f"cannot make {path}: {error.strerror}") from error
    status = os.lstat(path)
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & 0o077
    ):
        raise StartupError(f"{path} must be a folder that only this user can use")
    return path


def _parent() -> str:
    """The parent process, so that its number in another life is another one."""
    pid = os.getppid()
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in brackets may hold anything: look behind the last bracket.
            started = file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        started = ""
    return f"{pid} {started}"
