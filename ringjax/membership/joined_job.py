"""Joins a job: connects a worker to the coordinator and waits until the job starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from socket import gaierror
from typing import TYPE_CHECKING, Any

from ringjax.control.connecting import SERVER_RANK
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.tls import offer_for
from ringjax.errors import AuthenticationError, StartupError
from ringjax.membership.client import CoordinatorClient, worker_text
from ringjax.membership.connection import MAX_PAUSE, Connection
from ringjax.membership.init_warning import NO_WARNING, InitWarning
from ringjax.membership.job_credentials import JobCredentials

if TYPE_CHECKING:
    from ringjax.membership.coordinator import Coordinator


@dataclass
class JoinedJob:
    """A job that this process has joined.

    The coordinator is None if it runs in another process.
    """

    client: CoordinatorClient
    secret: bytes = field(repr=False)
    job: str
    coordinator: Coordinator | None = None

    def close_in_child(self) -> None:
        """Closes the copies of the parent's sockets in a forked child."""
        self.client.close_in_child()
        if self.coordinator is not None:
            self.coordinator.close_in_child()

    def close(self) -> None:
        """Leaves the job, and ends the coordinator if it runs in this process."""
        self.client.close()
        if self.coordinator is not None:
            self.coordinator.close()


def join(
    credentials: JobCredentials | Callable[[], JobCredentials],
    worker: int,
    hello: Mapping[str, Any] | Callable[[JobCredentials], Mapping[str, Any]],
    timeout: float,
    *,
    elastic_timeout: float = 0.0,
    failure_timeout: float = 5.0,
    retry_unauthenticated: bool = False,
    hint: str = "",
    tls: str = "auto",
    warning: InitWarning = NO_WARNING,
) -> CoordinatorClient:
    """Joins a job, and waits until the job has started.

    Args:
        credentials: the credentials of the job; or a function that is called before
            each attempt, and raises OSError while there are no credentials.
        worker: the id of this worker, which is its rank if the job is not elastic.
        hello: the description of this rank for the other ranks, as JSON; or a function
            that makes the hello for given credentials.
        timeout: seconds for all attempts.
        elastic_timeout: seconds in which the client tries to reconnect after it has
            lost the coordinator; then the client returns the directive `Stop`. With 0,
            the job is not elastic, and the client does not reconnect.
        failure_timeout: in an elastic job, seconds of silence after which the
            connection counts as lost.
        retry_unauthenticated: whether to try again if the server cannot authenticate,
            because another program may occupy the port that the coordinator will use.
        hint: advice to append to the error if no server could be reached.
        tls: whether the connection is encrypted, as in RINGJAX_TLS.
        warning: shows one line if joining takes long.

    Returns:
        The client. `CoordinatorClient.first` is its first directive.

    Raises:
        StartupError: no server replied, too few workers joined, or the coordinator
            refuses this worker.
        AuthenticationError: the coordinator does not have the secret.
        Fenced: this worker has been declared lost.

    Example:
        >>> from ringjax.membership.coordinator import Coordinator
        >>> coordinator = Coordinator(bytes(32), "0123456789abcdef", np=1)
        >>> coordinator.start()
        >>> where = coordinator.addresses[0]
        >>> credentials = JobCredentials(where, bytes(32), "0123456789abcdef")
        >>> worker = join(credentials, 4, {"shm": True}, 9.0)
        >>> worker.epoch, worker.rank, worker.members[0].shm
        (0, 0, True)
        >>> worker.close()
        >>> coordinator.close()
    """
    deadline, pause = time.monotonic() + timeout, 0.01
    silence = failure_timeout if elastic_timeout else 0.0
    was_unauthenticated = False
    while True:
        try:
            known = credentials() if callable(credentials) else credentials
            entries = hello(known) if callable(hello) else hello
            request = HandshakeRequest(
                known.job, Purpose.RENDEZVOUS, worker, SERVER_RANK, tls=offer_for(tls)
            )
            connection = Connection(known, request, silence, elastic_timeout)
            client = CoordinatorClient(worker, connection, dict(entries))
            client.enter(deadline, warning)
            return client
        except (OSError, AuthenticationError) as error:
            unauthenticated = isinstance(error, AuthenticationError)
            # A coordinator that is killed during a handshake closes the connection as
            # one that refuses does, so only the second close in a row is a refusal.
            if unauthenticated and was_unauthenticated and not retry_unauthenticated:
                raise
            was_unauthenticated = unauthenticated
            why = f"{error}{hint}"
            if retry_unauthenticated and isinstance(error.__cause__, gaierror):
                why += "; set MASTER_ADDR to a name or address that this host knows"
            if time.monotonic() + pause >= deadline:
                kind = AuthenticationError if unauthenticated else StartupError
                name = worker_text(worker, elastic=elastic_timeout > 0)
                text = f"{name} could not join its job within {timeout:g} s: {why}"
                raise kind(text) from error
            warning.no_rendezvous(why)
        # Poll: nothing can notify a rank when the coordinator begins to listen.
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_PAUSE)
