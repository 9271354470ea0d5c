"""The rendezvous: gathering, who is told what when somebody is missing, and epochs.

Ranks are threads here: they differ from processes only by how they end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from support.waiting import LONG, until

from ringjax.control import addresses
from ringjax.control.handshake import Introduction, Purpose, introduce
from ringjax.control.rendezvous import Failure, Server, Session, join
from ringjax.control.session import SERVER_RANK, News, ranks_text
from ringjax.errors import AuthenticationError, RingjaxError, Stalled, StartupError

SECRET, JOB = b"s" * 32, "0123456789abcdef"
START_TIMEOUT = LONG


class Town:
    """A server and the ranks that visit it."""

    def __init__(self, size: int, start_timeout: float = START_TIMEOUT) -> None:
        self.log: list[str] = []
        self.size = size
        self.server = Server(
            SECRET, JOB, size, start_timeout=start_timeout, log=self.log.append
        )
        self.server.start()
        self.where = ",".join(self.server.addresses)
        self.pool = ThreadPoolExecutor(size + 2)
        self.sessions: list[Session] = []

    def join(self, rank: int, secret: bytes = SECRET, **more: Any) -> Session:
        hello = {"rank": rank, "size": self.size, "name": f"host{rank}"} | more
        session = join(self.where, secret, JOB, hello, START_TIMEOUT)
        self.sessions.append(session)
        return session

    def start(self, ranks: Sequence[int]) -> list[Future[Session]]:
        return [self.pool.submit(self.join, rank) for rank in ranks]

    def gather(self) -> list[Session]:
        return [future.result() for future in self.start(range(self.size))]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.server.close()
        self.server.close()  # twice is fine
        self.pool.shutdown()


@pytest.fixture
def town() -> Iterator[Callable[..., Town]]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any) -> Town:
            town = Town(*args)
            stack.callback(town.close)
            return town

        yield make


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_learns_about_everybody(town: Callable[..., Town], size: int) -> None:
    here = town(size)
    for rank, session in enumerate(here.gather()):
        assert [m.rank for m in session.members] == list(range(size))
        assert [m.hello["name"] for m in session.members] == [
            f"host{r}" for r in range(size)
        ]
        assert {m.seen for m in session.members} == {"127.0.0.1"}
        assert (session.rank, session.epoch) == (rank, 0)
    assert here.server.joined == set(range(size))
    assert here.server.failures == []


def test_missing_ranks_are_named_to_all_and_to_the_launcher(
    town: Callable[..., Town],
) -> None:
    here = town(4, 2.0)  # in which two threads have called
    for future in here.start([1, 3]):
        with pytest.raises(StartupError) as error:
            future.result()
        assert str(error.value) == "ranks 0, 2 of 4 did not join within 2 s"
    expected = Failure(SERVER_RANK, "ranks 0, 2 of 4 did not join within 2 s")
    assert here.server.failures == [expected]


def test_one_rank_that_waits_for_long_says_for_whom(town: Callable[..., Town]) -> None:
    here, said, asked = town(4), [], []
    answer = here.server._missing

    def counted(seat: Any, gathering: Any) -> None:
        answer(seat, gathering)
        asked.append(seat)

    here.server._missing = counted  # type: ignore[method-assign]

    def come(rank: int) -> Session:
        hello = {"rank": rank, "size": 4}
        news = News(lambda text: said.append((rank, text)), 1.0, 60.0)
        session = join(here.where, SECRET, JOB, hello, START_TIMEOUT, news=news)
        here.sessions.append(session)
        return session

    first = [here.pool.submit(come, rank) for rank in (1, 3)]
    until(lambda: said and len(asked) == 2)
    assert [text for _, text in said] == [
        "has waited 1 s in init for ranks 0, 2 of 4; it waits up to 60 s"
    ]
    last = here.start([0, 2])
    assert all(len(future.result().members) == 4 for future in [*first, *last])
    assert len(said) == 1


def test_a_rank_that_finds_no_rendezvous_says_so() -> None:
    said: list[str] = []
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(StartupError):
        hello = {"rank": 1, "size": 2}
        join(where, SECRET, JOB, hello, 0.8, news=News(said.append, 0.2, 0.8))
    assert len(said) == 1
    assert said[0].startswith("has waited 0.2 s in init for the rendezvous of its job")


def test_time_runs_only_when_somebody_waits(town: Callable[..., Town]) -> None:
    here = town(2, 0.3)
    time.sleep(0.8)  # a program that needs long until it calls init
    assert here.server.failures == []
    here.server._start_timeout = LONG  # for those that come
    here.gather()


def test_the_wrong_secret_is_refused_at_once_and_logged_once(
    town: Callable[..., Town],
) -> None:
    here = town(2)
    for _ in range(3):  # else each would try again for as long as it may
        with pytest.raises(
            AuthenticationError, match="does not know this job's secret"
        ):
            here.join(0, b"w" * 32)
    here.gather()
    until(lambda: bool(here.log))
    assert len(here.log) == 1
    assert "another secret" in here.log[0]


def test_another_job_is_refused(town: Callable[..., Town]) -> None:
    here = town(1)
    with pytest.raises(AuthenticationError, match="it belongs to another job"):
        join(here.where, SECRET, "f" * 16, {"rank": 0, "size": 1}, LONG)
    until(lambda: here.log)
    assert "belongs to job ffffffffffffffff" in here.log[0]


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [
        (0, 3, "the job has 2 ranks, not 3"),
        (2, 2, "closed the connection during the handshake"),
    ],
)
def test_a_rank_that_does_not_fit(
    town: Callable[..., Town], rank: int, size: int, text: str
) -> None:
    here = town(2)
    with pytest.raises(StartupError, match=text):
        join(here.where, SECRET, JOB, {"rank": rank, "size": size}, LONG)


def test_a_rank_that_is_there_already(town: Callable[..., Town]) -> None:
    here = town(2)
    (first,) = here.start([0])
    until(lambda: here.server.joined == {0})
    with pytest.raises(
        StartupError, match=r"rank 0 has joined already, from 127.0.0.1"
    ):
        here.join(0)
    here.join(1)
    first.result()


def test_a_rank_may_die_and_come_again_while_the_others_wait(
    town: Callable[..., Town],
) -> None:
    here = town(2)
    dead = threading.Event()

    def die() -> None:
        where = addresses.parse(here.where)[0]
        with socket.create_connection(where) as sock:
            hello = Introduction(JOB, Purpose.RENDEZVOUS, 1, SERVER_RANK)
            keys = introduce(sock, SECRET, hello)
            sock.sendall(keys.sealer().seal({"type": "hello", "size": 2}))
            until(lambda: 1 in here.server.joined)
        dead.set()

    here.pool.submit(die).result()
    until(lambda: here.server.joined == set())
    assert dead.is_set()
    assert [s.epoch for s in here.gather()] == [0, 0]


def test_nobody_answers() -> None:
    with addresses.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(
        StartupError, match=r"rank 0 could not join its job within 0.5 s"
    ):
        join(f"127.0.0.1:{port}", SECRET, JOB, {"rank": 0, "size": 1}, 0.5)
    assert time.monotonic() - begin > 0.3


def test_a_second_address_helps(town: Callable[..., Town]) -> None:
    here = town(1)
    with addresses.listen("127.0.0.1") as taken:
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
    here.where = f"{dead},{here.where}"
    assert here.join(0).members[0].rank == 0


class Stranger:
    """Something else on the port: it shows everybody out."""

    def __init__(self) -> None:
        self.sock = addresses.listen("127.0.0.1")
        self.where = addresses.show(*self.sock.getsockname())
        self.visits = 0
        self.thread = threading.Thread(target=self.live)

    def live(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.sock.accept()[0].close()
                self.visits += 1

    def __enter__(self) -> Stranger:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.thread.join()


def test_a_patient_rank_waits_for_the_right_server() -> None:
    hello = {"rank": 0, "size": 1}
    with Stranger() as stranger:
        with pytest.raises(StartupError, match="within 1 s"):
            join(stranger.where, SECRET, JOB, hello, 1.0, patient=True)
        assert stranger.visits > 1


def _as_many(found: Sequence[object], count: int) -> bool:
    return len(found) == count


def test_failures_in_order_of_arrival(town: Callable[..., Town]) -> None:
    here = town(3)
    sessions = here.gather()
    for count, rank in enumerate((2, 0)):
        sessions[rank].report_failure(f"ValueError: {rank}")
        until(partial(_as_many, here.server.failures, count + 1))
    assert here.server.failures == [
        Failure(2, "ValueError: 2"),
        Failure(0, "ValueError: 0"),
    ]
    until(lambda: sessions[1].gone().keys() == {0, 2})
    assert sessions[1].gone()[2] == "failed: ValueError: 2"


def test_the_others_hear_who_left_and_who_died(town: Callable[..., Town]) -> None:
    here = town(3)
    sessions = here.gather()
    sessions[0].leave()
    sessions[2].close()
    until(lambda: sessions[1].gone().keys() == {0, 2})
    assert sessions[1].gone()[0] == "left"
    assert "lost its connection to the rendezvous" in sessions[1].gone()[2]


class Light:
    """A rank without a thread, which reads nothing; many fit into one test."""

    def __init__(self, town: Town, rank: int) -> None:
        self.sock = socket.create_connection(addresses.parse(town.where)[0], LONG)
        hello = Introduction(JOB, Purpose.RENDEZVOUS, rank, SERVER_RANK)
        self.sealer = introduce(self.sock, SECRET, hello).sealer()
        self.say({"type": "hello", "size": town.size, "hello": {"rank": rank}})

    def say(self, message: dict[str, Any]) -> None:
        self.sock.sendall(self.sealer.seal(message))


@pytest.mark.parametrize("way", ["die", "leave"])
def test_three_hundred_ranks_end_at_once(town: Callable[..., Town], way: str) -> None:
    here = town(301)
    with contextlib.ExitStack() as stack:
        ranks = [Light(here, rank) for rank in range(1, 301)]
        for rank in ranks:
            stack.enter_context(rank.sock)
        rest = here.join(0)
        for rank in ranks:
            if way == "leave":
                rank.say({"type": "leave"})
            rank.sock.close()  # what it was told is unread, so that sending fails
    until(lambda: len(rest.gone()) == 300)
    rest.close()
    until(lambda: not here.server._epochs)  # its thread lives


def test_exchange(town: Callable[..., Town]) -> None:
    here = town(3)
    sessions = here.gather()
    for turn in range(3):
        futures = [
            here.pool.submit(s.exchange, [s.rank, turn], LONG, "test") for s in sessions
        ]
        expected = [[rank, turn] for rank in range(3)]
        assert [future.result() for future in futures] == [expected] * 3


def test_an_exchange_names_who_is_missing(town: Callable[..., Town]) -> None:
    here = town(3)
    sessions = here.gather()
    futures = [here.pool.submit(s.exchange, 1, 2.0, "vote") for s in sessions[:2]]
    for future in futures:
        with pytest.raises(Stalled, match="vote: rank 2 did not take part"):
            future.result()


def test_an_exchange_ends_when_a_rank_dies(town: Callable[..., Town]) -> None:
    here = town(3)
    sessions = here.gather()
    futures = [here.pool.submit(s.exchange, 1, 2 * LONG, "vote") for s in sessions[:2]]
    sessions[2].report_failure("MemoryError")
    for future in futures:
        with pytest.raises(Stalled, match="vote: rank 2 failed: MemoryError"):
            future.result(LONG)


def test_an_exchange_without_a_server(town: Callable[..., Town]) -> None:
    here = town(1)
    (session,) = here.gather()
    here.server.close()
    with pytest.raises(RingjaxError, match="vote: the rendezvous is gone"):
        session.exchange(1, LONG, "vote")
    session.report_failure("nobody hears it")  # and that is no error
    session.leave()


def test_ranks_leave_and_join_again(town: Callable[..., Town]) -> None:
    here = town(3)
    for epoch in range(5):
        sessions = here.gather()
        assert {s.epoch for s in sessions} == {epoch}
        for session in sessions:
            session.leave()
            session.close()


def test_a_quick_rank_may_join_again_before_a_slow_one_has_left(
    town: Callable[..., Town],
) -> None:
    here = town(2)
    old = here.gather()
    old[0].leave()
    (again,) = here.start([0])
    until(lambda: here.server.joined == {0})
    until(lambda: old[1].gone() == {0: "left"})  # the old epoch still works
    old[1].close()
    assert here.join(1).epoch == again.result().epoch == 1


def test_an_altered_message_ends_the_session_only(town: Callable[..., Town]) -> None:
    here = town(1)
    with socket.create_connection(addresses.parse(here.where)[0], LONG) as sock:
        hello = Introduction(JOB, Purpose.RENDEZVOUS, 0, SERVER_RANK)
        introduce(sock, SECRET, hello)
        sock.sendall(b"\0\0\0\2" + bytes(32) + b"{}")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    here.gather()


@pytest.mark.parametrize("text", ['{"type":"exchange"}', '{"type":7}', "{}"])
def test_odd_messages_of_a_member_do_no_harm(
    town: Callable[..., Town], text: str
) -> None:
    here = town(1)
    with socket.create_connection(addresses.parse(here.where)[0], LONG) as sock:
        hello = Introduction(JOB, Purpose.RENDEZVOUS, 0, SERVER_RANK)
        keys = introduce(sock, SECRET, hello)
        sealer, opener = keys.sealer(), keys.opener()
        sock.sendall(sealer.seal(json.loads(text)))
        sock.sendall(sealer.seal({"type": "hello", "size": 1, "hello": [1]}))
        (message,) = opener.feed(sock.recv(4096))
    assert message["members"] == [{"rank": 0, "seen": "127.0.0.1", "hello": {}}]
    until(lambda: here.server.joined == {0})


def test_strangers_do_not_disturb(town: Callable[..., Town]) -> None:
    here = town(2)
    where = addresses.parse(here.where)[0]
    with contextlib.ExitStack() as stack:
        for _ in range(100):  # more than may be in a handshake at once
            sock = stack.enter_context(socket.create_connection(where))
            sock.sendall(b"RINGJ")
        here.gather()


def test_a_taken_port() -> None:
    with (
        addresses.listen("127.0.0.1") as taken,
        pytest.raises(StartupError, match=r"cannot listen on 127.0.0.1:\d+: Address"),
    ):
        Server(SECRET, JOB, 1, port=taken.getsockname()[1])


def test_a_server_that_never_started_can_be_closed() -> None:
    Server(SECRET, JOB, 1).close()


def test_ranks_in_a_sentence() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1, 2"
    assert ranks_text(range(20)).endswith("14, 15 and 4 more")
