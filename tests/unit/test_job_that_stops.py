"""Tests of a job that stops at its first loss: start, messages to ranks, epochs.

test_coordinator.py tests the properties that such a job shares with an elastic one.
Ranks are threads here, which differ from processes only in how they end.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from support.coordinators import (
    JOB,
    SECRET,
    STOP_ON_LOSS,
    MakeJob,
    ThreadJob,
    connect_raw,
)
from support.waiting import LONG, until

from ringjax.control import addresses
from ringjax.control.member import ranks_text
from ringjax.errors import PeerLost, Stalled, StartupError
from ringjax.membership.client import CoordinatorClient
from ringjax.membership.init_warning import InitWarning
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join


def start_joining(job: ThreadJob, *ranks: int) -> list[Future[CoordinatorClient]]:
    """Starts to join these ranks in threads. Waits until the coordinator has them."""
    found = [job.pool.submit(job.join, rank) for rank in ranks]
    until(lambda: job.newcomers() >= set(ranks) or all(one.done() for one in found))
    return found


def test_missing_ranks_are_reported_to_ranks_and_launcher(make_job: MakeJob) -> None:
    job = make_job(4, **STOP_ON_LOSS, start_timeout=2.0)
    text = "ranks 0, 2 of 4 did not join within 2 s"
    for future in start_joining(job, 1, 3):
        with pytest.raises(StartupError) as error:
            future.result()
        assert str(error.value) == text
    assert job.wait_for_event("stop") == ("stop", text)
    job.gather(0, 1, 2, 3)  # ranks may try again


@pytest.mark.parametrize(
    ("options", "absent"), [(STOP_ON_LOSS, "ranks 0, 2 of 4"), ({}, "workers 0, 2")]
)
def test_a_long_wait_in_init_warns_once(
    make_job: MakeJob, options: Any, absent: str
) -> None:
    job, said = make_job(4, **options), []
    for worker in range(4):
        job.coordinator.expected(worker)

    def wait(rank: int) -> CoordinatorClient:
        warning = InitWarning(lambda text: said.append((rank, text)), 1.0, 60.0)
        return job.join(rank, warning=warning)

    first = [job.pool.submit(wait, rank) for rank in (1, 3)]
    until(lambda: said)
    last = job.gather(0, 2)
    assert all(len(c.members) == 4 for c in [*(f.result() for f in first), *last])
    assert [text for _, text in said] == [
        f"has waited 1 s in init for {absent}; it waits up to 60 s"
    ]


def test_a_missing_coordinator_causes_a_warning() -> None:
    said: list[str] = []
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    warning = InitWarning(said.append, 0.2, 0.8)
    with pytest.raises(StartupError):
        join(JobCredentials(where, SECRET, JOB), 1, {"size": 2}, 0.8, warning=warning)
    assert len(said) == 1
    assert said[0].startswith("has waited 0.2 s in init for the coordinator of its job")


def test_the_start_timeout_runs_only_while_ranks_wait(make_job: MakeJob) -> None:
    job = make_job(2, **STOP_ON_LOSS, start_timeout=LONG)
    assert job.coordinator._membership.deadline() is None
    (first,) = start_joining(job, 0)
    assert job.coordinator._membership.deadline() is not None
    job.join(1)
    first.result()


def test_an_ended_rank_fails_waiting_ranks(make_job: MakeJob) -> None:
    job = make_job(2, **STOP_ON_LOSS, start_timeout=2 * LONG)
    (first,) = start_joining(job, 0)
    job.coordinator.process_ended(1, "ended without an error")
    text = "rank 1 ended without an error while others wait for it in ringjax.init()"
    with pytest.raises(StartupError) as error:
        first.result(LONG)
    assert str(error.value) == text
    assert job.wait_for_event("stop") == ("stop", text)


def test_a_rank_may_end_while_no_rank_waits(make_job: MakeJob) -> None:
    job = make_job(2, **STOP_ON_LOSS)
    zero, one = job.gather(0, 1)
    one.leave()
    one.close()
    job.coordinator.process_ended(1, "ended without an error")
    until(lambda: not job.coordinator._membership._exited)
    zero.leave()
    assert [event[0] for event in job.events if event[0] == "stop"] == []


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [
        (0, 3, "the job has 2 ranks, not 3"),
        (2, 2, "closed the connection during the handshake"),
    ],
)
def test_a_wrong_rank_or_size_is_refused(
    make_job: MakeJob, rank: int, size: int, text: str
) -> None:
    job = make_job(2, **STOP_ON_LOSS)
    with pytest.raises(StartupError, match=text):
        job.join(rank, size=size)


def test_a_rank_can_join_only_once(make_job: MakeJob) -> None:
    job = make_job(2, **STOP_ON_LOSS)
    (first,) = start_joining(job, 0)
    with pytest.raises(
        StartupError, match=r"rank 0 has joined already, from 127.0.0.1"
    ):
        join(JobCredentials(job.addresses, SECRET, JOB), 0, {"size": 2}, LONG)
    job.join(1)
    first.result()


def test_a_rank_may_reconnect_while_others_wait(make_job: MakeJob) -> None:
    job = make_job(2, **STOP_ON_LOSS)
    with RawRank(job, 1):
        until(lambda: job.newcomers() == {1})
    until(lambda: job.newcomers() == set())
    assert [client.epoch for client in job.gather(0, 1)] == [0, 0]


class ClosingServer:
    """A foreign server at the coordinator's address, which closes all connections."""

    def __init__(self) -> None:
        self.sock = addresses.listen("127.0.0.1")
        self.where = addresses.show(*self.sock.getsockname())
        self.accepted = 0
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.sock.accept()[0].close()
                self.accepted += 1

    def __enter__(self) -> ClosingServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.thread.join()


def test_joining_retries_a_foreign_server() -> None:
    with ClosingServer() as server:
        with pytest.raises(StartupError, match="within 1 s"):
            join(
                JobCredentials(server.where, SECRET, JOB),
                0,
                {"size": 1},
                1.0,
                retry_unauthenticated=True,
            )
        assert server.accepted > 1


def test_failures_are_reported_in_order(make_job: MakeJob) -> None:
    job = make_job(3, **STOP_ON_LOSS)
    clients = job.gather(0, 1, 2)
    for rank in (2, 0):
        clients[rank].report_failure(f"ValueError: {rank}")
        until(lambda r=rank: r in clients[1].departed_ranks())
    assert clients[1].departed_ranks()[2] == "failed: ValueError: 2"
    job.wait_for_event("failure")
    assert [event for event in job.events if event[0] == "failure"] == [
        ("failure", 2, "ValueError: 2"),
        ("failure", 0, "ValueError: 0"),
    ]


def test_members_are_notified_of_leaves_and_deaths(make_job: MakeJob) -> None:
    job = make_job(3, **STOP_ON_LOSS)
    zero, one, two = job.gather(0, 1, 2)
    zero.leave()
    two.close()
    until(lambda: one.departed_ranks().keys() == {0, 2})
    assert one.departed_ranks()[0] == "has finished and left the job"
    assert "lost its connection to the coordinator" in one.departed_ranks()[2]


class RawRank:
    """A rank without a thread that reads nothing, so that a test can have hundreds."""

    def __init__(self, job: ThreadJob, rank: int) -> None:
        self.sock, self.sealer = connect_raw(job, rank)
        self.send({"type": "hello", "hello": {"size": job.options["np"]}})

    def send(self, message: dict[str, Any]) -> None:
        self.sock.sendall(self.sealer.seal(message))

    def __enter__(self) -> RawRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


@pytest.mark.parametrize("way", ["die", "leave"])
def test_three_hundred_ranks_end_at_once(make_job: MakeJob, way: str) -> None:
    job = make_job(301, **STOP_ON_LOSS)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(RawRank(job, rank)) for rank in range(1, 301)]
        rest = job.join(0)
        for rank in ranks:
            if way == "leave":
                rank.send({"type": "leave", "epoch": 0})
            # The socket's buffer holds unread messages, so closing the socket resets
            # the connection, and the coordinator fails to send.
            rank.sock.close()
    until(lambda: len(rest.departed_ranks()) == 300)
    rest.close()
    until(lambda: not job.coordinator._workers)  # the coordinator's thread still runs


def test_an_exchange_ends_when_a_rank_dies(make_job: MakeJob) -> None:
    job = make_job(3, **STOP_ON_LOSS)
    clients = job.gather(0, 1, 2)
    votes = [job.pool.submit(c.exchange, 1, 2 * LONG, "vote") for c in clients[:2]]
    clients[2].report_failure("MemoryError")
    for vote in votes:
        with pytest.raises(Stalled, match="vote: rank 2 failed: MemoryError"):
            vote.result(LONG)


def test_an_exchange_without_a_coordinator(make_job: MakeJob) -> None:
    job = make_job(1, **STOP_ON_LOSS)
    (client,) = job.gather(0)
    job.coordinator.close()
    with pytest.raises(PeerLost, match="vote: the coordinator is gone: it closed"):
        client.exchange(1, LONG, "vote")
    client.report_failure("nobody hears it")  # no error
    client.leave()


def test_a_rank_has_no_thread_and_no_other_descriptor(make_job: MakeJob) -> None:
    job = make_job(1, **STOP_ON_LOSS)
    before = threading.active_count()
    (client,) = job.gather(0)
    assert client.exchange(7, LONG, "vote") == [7]
    assert client.fileno() == -1
    job.pool.shutdown()
    assert threading.active_count() <= before


def test_a_rank_may_rejoin_before_others_have_left(
    make_job: MakeJob,
) -> None:
    job = make_job(2, **STOP_ON_LOSS)
    zero, one = job.gather(0, 1)
    zero.leave()
    zero.close()
    (again,) = start_joining(job, 0)
    until(lambda: 0 in one.departed_ranks())  # epoch 0 still works
    one.close()
    assert job.join(1).epoch == again.result().epoch == 1


def test_ranks_text() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1, 2"
    assert ranks_text(range(20)).endswith("14, 15 and 4 more")
