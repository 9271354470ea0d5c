"""Finds the address of the coordinator of a rank's job, and joins the job.

Under mpirun, srun, torchrun and others, rank 0 runs the coordinator in its own process.
The other ranks need the *job credentials* to join, from one of three sources:

==================  ========================================  =======================
Ranks are           Addresses and job id                      Secret
==================  ========================================  =======================
started by ringrun  RINGJAX_RENDEZVOUS, RINGJAX_JOB           RINGJAX_SECRET[_FILE]
on one host         credentials file, written by rank 0       credentials file, random
on several hosts    computed equally by every rank from the   RINGJAX_SECRET[_FILE]
                    variables of the launcher
==================  ========================================  =======================
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.launch_environment import LaunchInfo
from ringjax.control.member import JsonObject
from ringjax.errors import StartupError
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.init_warning import InitWarning
from ringjax.membership.job_credentials import (
    CredentialsFile,
    JobCredentials,
    derive_job_id,
)
from ringjax.membership.joined_job import JoinedJob, join

# Linux assigns ports up to 60999 to outgoing connections (ip_local_port_range), so
# higher ports are rarely in use by accident.
_FIRST_PORT, _PORT_COUNT = 61000, 4500
_PORT_ATTEMPTS = 4  # neighboring ports to try, because another job may use the first
# For each launcher, the text that is appended to the error about a missing secret.
_SECRET_HINTS = {"Slurm": "; or run ringrun in the batch script, which needs none"}
# Maps the secret and the job id to the entries about a listening socket in the hello.
OpenListener = Callable[[bytes, str], JsonObject]


def start_coordinator(
    info: LaunchInfo, config: Config, file: CredentialsFile | None
) -> tuple[JobCredentials, Coordinator]:
    """Starts the coordinator in rank 0, if ringrun does not run it.

    Args:
        file: publishes the credentials for the other ranks of this host; pass None if
            the job spans several hosts.

    Raises:
        StartupError: no port is free, the credentials file cannot be written, or the
            job spans hosts and no secret is set.
    """
    if file is not None:
        secret, job = secrets.token_bytes(32), secrets.token_hex(8)
        hosts, ports = [address.loopback()], [0]
    else:
        secret, job = _required_secret(info, config), _job_id(info, config)
        hosts = address.of_interfaces(config.network_interfaces)
        ports = _candidate_ports(info)
    failure: StartupError | None = None
    for port in ports:
        try:
            coordinator = Coordinator(
                secret,
                job,
                np=info.size,
                on_loss="stop",
                hosts=hosts,
                port=port,
                start_timeout=config.start_timeout,
                tls=config.tls,
            )
        except StartupError as error:
            failure = error
            continue
        credentials = JobCredentials(",".join(coordinator.addresses), secret, job)
        # Write the file only now that the coordinator listens: ranks connect as soon as
        # they read the file.
        try:
            if file is not None:
                file.write(credentials)
        except BaseException:
            coordinator.close()
            raise
        coordinator.start()
        return credentials, coordinator
    assert failure is not None
    raise failure


def join_job(
    info: LaunchInfo,
    config: Config,
    hello: JsonObject,
    open_listener: OpenListener,
    warn: Callable[[str], None] = lambda text: None,
) -> JoinedJob:
    """Finds the coordinator of this process's job, joins and waits for all ranks.

    The caller closes the result.

    Args:
        hello: the description of this rank for the other ranks.
        open_listener: opens the socket on which other ranks will connect to this rank.
            `join_job` calls this function before this rank joins, because the hello
            contains the address of the socket, and again if the credentials change.
        warn: shows one line if joining takes longer than RINGJAX_STALL_WARNING.

    Raises:
        StartupError: not all ranks have joined. The text names the missing ranks or the
            variable to set.
    """
    single_host = info.single_host and not config.rendezvous
    file = CredentialsFile(info) if single_host else None
    coordinator: Coordinator | None = None
    credentials: JobCredentials | Callable[[], JobCredentials]
    if file is not None and info.rank != 0:
        # A killed job may have left the file behind. Such a file looks valid, and only
        # an attempt to join shows that no process or another job listens at the
        # address. So `join` reads the file before every attempt.
        credentials = file.credentials
    elif config.rendezvous or info.rank != 0:
        credentials = derive_credentials(info, config)
    else:
        credentials, coordinator = start_coordinator(info, config, file)
    opened: dict[JobCredentials, JsonObject] = {}

    def hello_for(credentials: JobCredentials) -> JsonObject:
        if credentials not in opened:
            opened.clear()
            opened[credentials] = open_listener(credentials.secret, credentials.job)
        return hello | opened[credentials]

    try:
        client = join(
            credentials,
            info.rank if config.worker is None else config.worker,
            hello_for,
            config.start_timeout,
            elastic_timeout=config.elastic_timeout if config.elastic else 0.0,
            failure_timeout=config.failure_timeout,
            # Without ringrun, another program may occupy the computed port, so keep
            # trying until rank 0 uses the next port. With an address from ringrun, fail
            # at once.
            retry_unauthenticated=not config.rendezvous,
            hint="" if file is None else file.hint,
            tls=config.tls,
            warning=InitWarning(warn, config.stall_warning, config.start_timeout),
        )
    except BaseException:
        if coordinator is not None:
            coordinator.close()
        raise
    finally:
        # All ranks have joined, or the start has failed. Remove the file, so that no
        # later job finds the credentials of this job.
        if coordinator is not None and file is not None:
            # An error of the removal must not replace an error of `join`.
            with contextlib.suppress(OSError, StartupError):
                file.remove()
    [used] = opened
    return JoinedJob(client, used.secret, used.job, coordinator)


def derive_credentials(info: LaunchInfo, config: Config) -> JobCredentials:
    """Derives the job credentials from `RINGJAX_*` and the launcher's variables.

    Under ringrun, `RINGJAX_*` contains addresses, secret and job id. Under another
    launcher, `RINGJAX_*` contains only the secret; every rank computes equal addresses
    and an equal job id.

    Raises:
        StartupError: the secret, the job id or the host of rank 0 is not known.
    """
    secret = _required_secret(info, config)
    if config.rendezvous:
        if not config.job:
            raise StartupError("RINGJAX_RENDEZVOUS is set but RINGJAX_JOB is not")
        return JobCredentials(config.rendezvous, secret, config.job)
    if not info.rank0_host:
        raise StartupError(
            f"{info.launcher} started {info.size} ranks on several hosts and does not "
            f"tell where rank 0 is: set MASTER_ADDR to the name of its host"
        )
    addresses = ",".join(
        address.show(info.rank0_host, port) for port in _candidate_ports(info)
    )
    return JobCredentials(addresses, secret, _job_id(info, config))


def configured_secret(config: Config) -> bytes | None:
    """Returns the secret in the settings, or None. Raises StartupError if invalid."""
    try:
        return config.secret_bytes()
    except ValueError as error:
        raise StartupError(str(error)) from None


def _required_secret(info: LaunchInfo, config: Config) -> bytes:
    secret = configured_secret(config)
    if secret is None:
        raise StartupError(
            f"the job has {info.size} ranks ({info.launcher}) but no secret: set "
            f"RINGJAX_SECRET_FILE to a file that all of them can read and only you "
            f"(openssl rand -hex 32 > FILE; chmod 600 FILE), or RINGJAX_SECRET to what "
            f"is in it{_SECRET_HINTS.get(info.launcher, '')}"
        )
    return secret


def _job_id(info: LaunchInfo, config: Config) -> str:
    return config.job or derive_job_id(info.identity or info.rank0_host, info.size)


def _candidate_ports(info: LaunchInfo) -> list[int]:
    """Returns the ports where rank 0 tries to listen and other ranks try to connect."""
    first = info.port
    if not first:
        number = int(derive_job_id(info.identity, info.size), 16)
        first = _FIRST_PORT + number % _PORT_COUNT
    return list(range(first, min(first + _PORT_ATTEMPTS, 65536)))
