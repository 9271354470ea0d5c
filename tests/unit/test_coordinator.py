"""Tests of the coordinator and its clients over sockets.

test_membership.py tests the rules without sockets. Tests marked `both` run with jobs
that repair losses and with jobs that stop at the first loss; test_job_that_stops.py has
the other tests of the latter. Workers are threads here, which differ from processes
only in how they end.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import weakref
from typing import Any

import pytest
from support.coordinators import JOB, SECRET, STOP_ON_LOSS, MakeJob, connect_raw
from support.waiting import LONG, until

from ringjax import errors
from ringjax.control import addresses
from ringjax.errors import AuthenticationError, PeerLost, Stalled, StartupError
from ringjax.membership.client import CoordinatorClient
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.directives import (
    Dismiss,
    EpochDirective,
    Fence,
    ResizePending,
    Revoke,
    Stop,
    Welcome,
)
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

_unread: weakref.WeakKeyDictionary[CoordinatorClient, list[Any]] = (
    weakref.WeakKeyDictionary()
)


def next_directive(worker: CoordinatorClient, kind: type) -> Any:
    """Waits for the next directive of this kind. Skips directives of other kinds."""
    directives = _unread.setdefault(worker, [])
    while True:
        while directives:
            directive = directives.pop(0)
            if isinstance(directive, kind):
                return directive
        assert select.select([worker], [], [], LONG)[0], f"no {kind.__name__}"
        directives += worker.poll()


both = pytest.mark.parametrize("options", [{}, STOP_ON_LOSS], ids=["repairs", "stops"])


@both
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_worker_receives_all_members(
    make_job: MakeJob, options: dict[str, Any], size: int
) -> None:
    job = make_job(size, **options)
    clients = list(
        job.pool.map(
            lambda w: job.join(w, hostname=f"host{w}", addresses=f"h:{w}"), range(size)
        )
    )
    for rank, client in enumerate(clients):
        assert isinstance(client.first, EpochDirective)
        assert [m.rank for m in client.members] == list(range(size))
        assert [m.worker for m in client.members] == list(range(size))
        assert [m.hostname for m in client.members] == [f"host{r}" for r in range(size)]
        assert [m.host for m in client.members] == list(range(size))
        found = client.locate(range(size), LONG, "test", 0)
        assert [found[r].addresses for r in range(size)] == [f"h:{r}" for r in found]
        assert {address.seen for address in found.values()} == {"127.0.0.1"}
        assert client.locate(range(size), 0.0, "test", 0) == found  # it has not asked
        assert (client.rank, client.size, client.epoch) == (rank, size, 0)
    ranks = {rank: rank for rank in range(size)}
    assert job.wait_for_event("members") == ("members", 0, "start", ranks)


def test_a_loss_is_repaired(make_job: MakeJob) -> None:
    # With these limits the test fails if the repair waits for a timeout.
    job = make_job(3, failure_timeout=3600.0, elastic_timeout=3600.0)
    zero, one, two = job.gather(0, 1, 2)
    one.close()
    for worker in (zero, two):
        revoke = next_directive(worker, Revoke)
        assert revoke.lost.keys() == {1} == worker.departed_ranks().keys()
        worker.report(0, {0: (5, 6, True), 3: (2, 2, False)}, {1: [0, 2]}, 2)
    members = next_directive(two, EpochDirective)
    assert (members.epoch, members.kind, members.rank) == (1, "repair", 1)
    assert (members.previous, members.new_ranks) == ((0, 2), (0, -1, 1))
    assert members.decisions == {0: (6, True), 3: (2, False)}
    assert (members.sets, members.next_set) == ({1: (0, 1)}, 2)
    assert next_directive(zero, EpochDirective).rank == 0
    assert two.departed_ranks() == {}
    assert job.wait_for_event("fenced")[1] == 1


def test_resize(make_job: MakeJob) -> None:
    job = make_job(2, max_np=3)
    zero, one = job.gather(0, 1)
    newcomer = job.join(7)
    assert newcomer.first == Welcome(0, 2, 3, "epoch 0 has 2 members")
    one.request_leave()
    newcomer.ready()
    update = next_directive(zero, ResizePending)
    while update.joining < 1 or update.leaving < 1:
        update = next_directive(zero, ResizePending)
    for worker in (zero, one):
        worker.pause(0, update.number, {4: [0, 1]}, 5)
    assert isinstance(next_directive(one, Dismiss), Dismiss)
    members = next_directive(newcomer, EpochDirective)
    assert (members.kind, members.previous, members.rank) == ("resize", (0, -1), 1)
    assert (members.sets, members.next_set) == ({4: (0,)}, 5)
    assert (newcomer.rank, newcomer.size, newcomer.epoch) == (1, 2, 1)
    assert job.wait_for_event("dismissed")[1] == 1


def test_restart_and_suspicion(make_job: MakeJob) -> None:
    job = make_job(3)
    workers = job.gather(0, 1, 2)
    workers[1].restart(0, "ValueError")
    for worker in workers:
        assert next_directive(worker, Revoke).restart
        worker.report(0, {0: (3, 4, True)})
    for worker in workers:
        members = next_directive(worker, EpochDirective)
        assert (members.kind, members.decisions) == ("restart", {0: (3, False)})
    workers[0].suspect(0, 2, "of the past")
    workers[0].suspect(1, 2, "silent for 5 s")
    for worker in workers[:2]:
        next_directive(worker, Revoke)
        worker.report(1, {})
    assert next_directive(workers[2], Fence).text == "silent for 5 s (says rank 0)"
    assert next_directive(workers[0], EpochDirective).previous == (0, 1)


def test_a_rank_that_could_not_connect_an_epoch_is_not_excluded(
    make_job: MakeJob,
) -> None:
    """It closes its links, which peers that have connected see as a shutdown."""
    job = make_job(3)
    workers = job.gather(0, 1, 2)
    workers[0].suspect(0, 1, f"{errors.SHUT_DOWN} (its program has ended)")
    for worker in workers:
        next_directive(worker, Revoke)
        worker.report(0, {})
    for worker in workers:
        members = next_directive(worker, EpochDirective)
        assert (members.kind, len(members.members)) == ("repair", 3)


@both
def test_exchanges_return_all_values(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job(3, **options)
    workers = job.gather(0, 1, 2)
    for turn in range(3):
        values = job.pool.map(
            lambda w, t=turn: w.exchange([w.rank, t], 5.0, "test"), workers
        )
        assert list(values) == [[[rank, turn] for rank in range(3)]] * 3
    with pytest.raises(PeerLost, match="vote: epoch 7 is over, 0 has begun"):
        workers[0].exchange(1, 5.0, "vote", epoch=7)
    with pytest.raises(Stalled, match="vote: ranks 1, 2 did not take part") as told:
        workers[0].exchange(1, 0.2, "vote")
    assert (told.value.rank, told.value.ranks) == (1, [1, 2])


def test_a_loss_ends_an_exchange(make_job: MakeJob) -> None:
    job = make_job(3)
    workers = job.gather(0, 1, 2)
    votes = [job.pool.submit(w.exchange, 1, 30.0, "vote") for w in workers[:2]]
    workers[2].close()
    for vote in votes:
        with pytest.raises(PeerLost, match="vote: epoch 0 is over: rank 2 lost") as e:
            vote.result()
        assert e.value.rank == 2


def test_a_member_that_finishes_ends_exchanges(make_job: MakeJob) -> None:
    job = make_job(2)
    zero, one = job.gather(0, 1)
    vote = job.pool.submit(one.exchange, 1, 30.0, "vote")
    zero.leave({0: (3, 3, True)})
    zero.close()
    with pytest.raises(Stalled, match="vote: rank 0 has finished and left the job"):
        vote.result()
    assert one.departed_ranks() == {0: "has finished and left the job"}
    late = job.join(5)
    assert isinstance(late.first, Dismiss)
    job.coordinator.process_ended(0, "exit code 0")
    one.leave()
    one.close()
    assert job.wait_for_event("finished") == ("finished", 0)
    assert "fenced" not in {event[0] for event in job.events}


def test_too_few_workers(make_job: MakeJob) -> None:
    job = make_job(3, 2, start_timeout=0.3)
    with pytest.raises(StartupError, match=r"1 of at least 2 ranks came within 0\.3 s"):
        job.join(0)
    assert job.wait_for_event("stop")[1].startswith("1 of at least 2 ranks")


@both
def test_the_wrong_secret_is_refused_at_once_and_logged_once(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job(2, **options)
    for _ in range(3):  # without this, each client would retry until its limit
        with pytest.raises(
            AuthenticationError, match="does not know this job's secret"
        ):
            job.join(0, b"w" * 32)
    job.gather(0, 1)
    until(lambda: bool(job.log))
    assert len(job.log) == 1
    assert "another secret" in job.log[0]


def test_a_rank_whose_init_fails_tells_the_others_why(make_job: MakeJob) -> None:
    """The rank may have noticed a loss before the coordinator has."""
    job = make_job(3, **STOP_ON_LOSS)
    _, one, two = job.gather(0, 1, 2)
    one.leave(error="world: rank 0 is gone: it closed the connection")
    until(lambda: two.departed_ranks())
    assert two.departed_ranks()[1] == (
        "has left the job, because its init failed: world: rank 0 is gone: it closed "
        "the connection"
    )


def test_another_job_is_refused(make_job: MakeJob) -> None:
    job = make_job(1)
    with pytest.raises(AuthenticationError, match="it belongs to another job"):
        join(JobCredentials(job.addresses, SECRET, "f" * 16), 0, {}, LONG)
    until(lambda: job.log)
    assert "belongs to job ffffffffffffffff" in job.log[0]


def test_a_worker_tries_again_after_a_coordinator_died_during_the_handshake(
    make_job: MakeJob,
) -> None:
    job = make_job(1)
    with socket.create_server(("127.0.0.1", 0)) as dying:
        places = iter([f"127.0.0.1:{dying.getsockname()[1]}", job.addresses])
        caller = job.pool.submit(
            join, lambda: JobCredentials(next(places), SECRET, JOB), 0, {}, LONG
        )
        dying.accept()[0].close()
        with contextlib.closing(caller.result(LONG)) as client:
            assert client.rank == 0


@pytest.mark.parametrize(
    ("patience", "who"), [(LONG, "worker 4"), (0.0, "rank 4")], ids=["repairs", "stops"]
)
def test_joining_times_out_if_no_server_replies(patience: float, who: str) -> None:
    with addresses.listen("127.0.0.1") as taken:
        where = addresses.show(*taken.getsockname())
    text = f"{who} could not join its job within 0.3 s"
    with pytest.raises(StartupError, match=text):
        join(JobCredentials(where, SECRET, JOB), 4, {}, 0.3, elastic_timeout=patience)


@both
def test_joining_tries_all_addresses(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job(1, **options)
    with addresses.listen("127.0.0.1") as taken:
        job.addresses = f"127.0.0.1:{taken.getsockname()[1]},{job.addresses}"
    assert job.join(0).members[0].rank == 0


def test_a_taken_port_is_an_error() -> None:
    with (
        addresses.listen("127.0.0.1") as taken,
        pytest.raises(StartupError, match=r"cannot listen on 127.0.0.1:\d+: Address"),
    ):
        Coordinator(SECRET, JOB, np=1, port=taken.getsockname()[1])


def test_a_coordinator_that_never_started_can_be_closed() -> None:
    Coordinator(SECRET, JOB, np=1).close()


@both
def test_foreign_connections_have_no_effect(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    job = make_job(2, **options)
    where = addresses.parse(job.addresses)[0]
    with contextlib.ExitStack() as stack:
        for count in range(100):  # more than the limit of concurrent handshakes
            sock = stack.enter_context(socket.create_connection(where))
            with contextlib.suppress(OSError):
                sock.sendall(b"RINGJ" if count % 2 else bytes(500))
        zero, one = job.gather(0, 1)
        votes = job.pool.map(lambda w: w.exchange(w.rank, LONG, "vote"), (zero, one))
        assert list(votes) == [[0, 1]] * 2


@both
@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello", "hello": 3},
        {"type": "hello", "hello": {}, "rejoin": {"epoch": "x"}},
        {"type": "hello", "hello": {}, "rejoin": {"epoch": 1, "members": []}},
        b"altered",
    ],
)
def test_a_bad_hello_only_ends_its_connection(
    make_job: MakeJob, options: dict[str, Any], message: Any
) -> None:
    job = make_job(1, **options)
    sock, sealer = connect_raw(job, 0 if job.stops_on_loss else 3)
    with sock:
        for odd in ({"type": "report"}, {"type": "exchange"}, {"type": 7}, {}):
            sock.sendall(sealer.seal(odd))  # ignored, because no hello came before
        altered = b"\0\0\0\2" + bytes(32) + b"{}"
        sock.sendall(altered if message == b"altered" else sealer.seal(message))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    job.gather(0)


def test_a_member_that_sends_a_bad_report_is_lost(make_job: MakeJob) -> None:
    job = make_job(2)
    sock, sealer = connect_raw(job, 1)
    with sock:
        sock.sendall(sealer.seal({"type": "hello", "hello": {}, "rejoin": None}))
        zero = job.join(0)
        sock.sendall(sealer.seal({"type": "report", "epoch": 0, "lines": 7}))
        assert "sent no report" in next_directive(zero, Revoke).lost[1]


def test_a_member_that_does_not_read_is_lost(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Coordinator, "max_unread", 1 << 20)
    job = make_job(2)
    sock, sealer = connect_raw(job, 1)
    with sock:
        sock.sendall(sealer.seal({"type": "hello", "hello": {}, "rejoin": None}))
        zero = job.join(0)
        for number in range(100):
            message = {"type": "exchange", "epoch": 0, "number": number, "seconds": 9}
            with contextlib.suppress(OSError):
                sock.sendall(
                    sealer.seal(message | {"value": secrets.token_hex(250_000)})
                )
            with contextlib.suppress(PeerLost):
                zero.exchange(0, 9.0, "vote")
            if zero.departed_ranks():
                break
        assert "it does not read" in zero.departed_ranks()[1]


def test_a_second_connection_of_a_member_fences_it(make_job: MakeJob) -> None:
    job = make_job(2)
    zero, _ = job.gather(0, 1)
    with pytest.raises(errors.Fenced, match="it connected again"):
        join(
            JobCredentials(job.addresses, SECRET, JOB),
            1,
            {},
            LONG,
            elastic_timeout=LONG,
        )
    assert next_directive(zero, Revoke).lost.keys() == {1}


def test_a_restarted_coordinator_continues_the_job(make_job: MakeJob) -> None:
    job = make_job(3, max_np=4)
    workers = job.gather(0, 1, 2)
    newcomer = job.join(9)
    port = addresses.parse(job.addresses)[0][1]
    job.coordinator.close()
    vote = job.pool.submit(workers[0].exchange, 0, LONG, "vote")
    workers[1].suspect(0, 2, "said while nobody listened")
    newcomer.ready()
    job.coordinator = job.start_coordinator(port=port, resume=True)
    for worker in workers[:2]:
        next_directive(worker, Revoke)
    with pytest.raises(PeerLost, match="vote: epoch 0 is over"):
        vote.result()
    for worker in workers:
        worker.report(0, {0: (1, 1, True)})
    for worker in workers[:2]:
        # The accused rank has reported too late and is lost.
        members = next_directive(worker, EpochDirective)
        assert (members.epoch, members.decisions) == (1, {0: (1, True)})
    assert next_directive(workers[0], ResizePending).joining == 1
    for worker in workers[:2]:
        worker.pause(1, 1)
    assert next_directive(newcomer, EpochDirective).previous == (0, 1, -1)


def test_the_launcher_is_notified_of_an_internal_error(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(1)
    monkeypatch.setattr(Coordinator, "on_message", lambda *_: 1 / 0)
    job.pool.submit(job.join, 0)
    thread = job.coordinator._thread
    assert thread is not None
    thread.join(LONG)
    text = "the coordinator failed: ZeroDivisionError('division by zero')"
    assert job.wait_for_event("stop") == ("stop", text)  # sent before the thread ended
    monkeypatch.undo()
    job.coordinator.close()
    job.coordinator = job.start_coordinator(port=addresses.parse(job.addresses)[0][1])
    until(lambda: bool(job.workers))


def test_the_launcher_may_pass_a_listener() -> None:
    with addresses.listen("127.0.0.1") as listener:
        coordinator = Coordinator(
            SECRET, JOB, np=1, listeners=[listener.dup()], hosts=("nowhere",)
        )
        coordinator.start()
        where = addresses.show(*listener.getsockname())
        worker = join(
            JobCredentials(where, SECRET, JOB), 0, {}, LONG, elastic_timeout=LONG
        )
        worker.close()
        coordinator.close()


def test_without_a_coordinator_a_worker_stops(make_job: MakeJob) -> None:
    job = make_job(1)
    worker = join(
        JobCredentials(job.addresses, SECRET, JOB), 0, {}, LONG, elastic_timeout=0.3
    )
    job.workers[0] = worker
    job.coordinator.close()
    assert next_directive(worker, Stop).text == "the coordinator was gone for 0.3 s"
    with pytest.raises(PeerLost, match="vote: the coordinator was gone"):
        worker.exchange(1, 5.0, "vote")


def test_closing_a_client_ends_its_waits(make_job: MakeJob) -> None:
    job = make_job(2)
    zero, _ = job.gather(0, 1)
    vote = job.pool.submit(zero.exchange, 1, 2 * LONG, "vote")
    poll = job.pool.submit(zero.poll, 2 * LONG)
    until(lambda: threading.active_count() > 4)
    zero.close()
    with pytest.raises(PeerLost, match="this worker has left the job"):
        vote.result(LONG)
    assert poll.result(LONG) == []
    zero.report(0, {})  # a report without a coordinator raises nothing
    zero.leave()
