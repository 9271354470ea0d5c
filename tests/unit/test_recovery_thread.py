"""Tests of the recovery thread with a simulated coordinator and world."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.waiting import LONG, until

from ringjax import errors
from ringjax.control.member import Member
from ringjax.errors import PeerLost, RingjaxError, Unreachable
from ringjax.membership.directives import (
    Directive,
    Dismiss,
    EpochDirective,
    Fence,
    ResizePending,
    Revoke,
    Stop,
)
from ringjax.world.rank_info import RankInfo
from ringjax.world.recovery import Recovery


def members(epoch: int, size: int = 3, kind: str = "repair") -> EpochDirective:
    everybody = tuple(Member(r, r) for r in range(size))
    return EpochDirective(epoch, kind, everybody, 0, tuple(range(size)), {}, {}, 1, {})


class FakeClient:
    """A fake of the client of the coordinator."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._orders: list[Directive] = []
        self.sent: list[tuple[Any, ...]] = []

    def receive(self, *orders: Directive) -> None:
        self._orders += orders
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> list[Directive]:
        found, self._orders = self._orders, []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return found

    def report(self, epoch: int, lines: Any, *rest: Any, **more: Any) -> None:
        self.sent.append(("report", epoch, dict(lines), more["restart"]))

    def suspect(self, epoch: int, rank: int, text: str) -> None:
        self.sent.append(("suspect", epoch, rank, text))

    def request_leave(self) -> None:
        self.sent.append(("leaving",))

    def report_failure(self, text: str) -> None:
        self.sent.append(("failure", text))

    def close(self) -> None:
        os.close(self._fd)


class FakeEpoch:
    """An epoch whose heartbeat reports the ranks in `dead` as lost."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rank_info = RankInfo.from_hosts(0, ["here"] * 3)
        self.dead: list[tuple[int, str]] = []

    def lost(self) -> list[tuple[int, str]]:
        return self.dead


class FakeWorld:
    """Records installed epochs and other events. `linking` may delay or fail links."""

    def __init__(self) -> None:
        self.current_epoch: Any = None
        self.linking: Callable[[Any], None] = lambda watch: None
        self.completing: Callable[[], None] = lambda: None
        self.events: list[Any] = []
        self.installed_epochs: list[int] = []

    def halt(self, text: str, rank: int) -> dict[int, tuple[int, int, bool]]:
        self.events.append(("halt", text, rank))
        return {0: (5, 6, True)}

    def epoch_report(self) -> tuple[dict[int, Sequence[int]], int, bool]:
        return {}, 1, False

    def link(self, directives: Sequence[EpochDirective], watch: Any) -> Any:
        self.linking(watch)
        return FakeEpoch(directives[-1].epoch)

    def complete(self, members: EpochDirective) -> None:
        self.completing()

    def install(self, epoch: Any, directives: Sequence[EpochDirective]) -> None:
        self.installed_epochs = [m.epoch for m in directives]
        self.current_epoch = epoch
        self.events.append(("install", epoch.number))

    @property
    def pending_update(self) -> int:
        return 0

    @pending_update.setter
    def pending_update(self, update: int) -> None:
        self.events.append(("update", update))

    def dismiss(self, text: str) -> None:
        self.events.append(("dismissed", text))

    def end(self, kind: type[RingjaxError], text: str) -> None:
        self.events.append((kind, text))

    def on_thread_failure(self, text: str) -> None:
        self.events.append(("broken", text))

    def log(self, level: str, text: str) -> None:
        if "could not be connected" in text:
            self.events.append((level, text))


class RecoveryTest:
    """A recovery thread with fakes, in the first epoch."""

    def __init__(self) -> None:
        self.world, self.client = FakeWorld(), FakeClient()
        self.recovery = Recovery(self.world, self.client)  # type: ignore[arg-type]
        self.recovery.start(members(0, kind="start"))
        self.wait(0)

    def wait(self, epoch: int) -> None:
        until(lambda: ("install", epoch) in self.world.events)

    def lose(self, rank: int) -> None:
        self.world.current_epoch.dead = [(rank, "died")]
        os.eventfd_write(self.recovery.notify_fd, 1)


@pytest.fixture
def test() -> Iterator[RecoveryTest]:
    found = RecoveryTest()
    yield found
    found.recovery.close()
    found.client.close()


def test_a_loss_is_reported_at_once_and_once(test: RecoveryTest) -> None:
    test.lose(2)
    until(lambda: len(test.client.sent) == 2)
    test.client.receive(Revoke(0, {2: "died"}, False), members(1))
    test.wait(1)
    assert test.client.sent == [
        ("suspect", 0, 2, "died"),
        ("report", 0, {0: (5, 6, True)}, False),
    ]
    assert ("halt", "rank 2 died", 2) in test.world.events


def test_a_revoke_from_the_coordinator_ends_the_epoch(test: RecoveryTest) -> None:
    test.client.receive(Revoke(0, {}, True))
    until(lambda: bool(test.client.sent))
    assert ("halt", "another rank asked to start again", -1) in test.world.events
    test.client.receive(members(1, kind="restart"))
    test.wait(1)
    assert test.world.installed_epochs == [1]


def test_a_suspicion_is_sent_before_the_report(
    test: RecoveryTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suspicion tells the coordinator why, so it must arrive before the report."""
    poll = test.client.poll

    def poll_and_lose() -> list[Directive]:
        # The thread must not see the losses before the message.
        if orders := poll():
            test.world.current_epoch.dead = [(1, "has not called"), (2, "died")]
        return orders

    monkeypatch.setattr(test.client, "poll", poll_and_lose)
    test.client.receive(Revoke(0, {2: "died"}, True))
    until(lambda: len(test.client.sent) == 2)
    assert test.client.sent == [
        ("suspect", 0, 1, "has not called"),
        ("report", 0, {0: (5, 6, True)}, False),
    ]


def test_an_epoch_that_is_revoked_while_links_connect_is_abandoned(
    test: RecoveryTest,
) -> None:
    began = threading.Event()

    def linking(watch: Any) -> None:
        began.set()
        while True:  # links/mesh.py also polls while it connects
            watch.departed_ranks()
            time.sleep(0.002)

    test.world.linking = linking
    test.client.receive(Revoke(0, {2: "died"}, False), members(1))
    assert began.wait(LONG)
    test.world.linking = lambda watch: None
    test.client.receive(Revoke(1, {1: "died, too"}, False), members(3, 1))
    test.wait(3)
    assert test.world.installed_epochs == [1, 3]  # both commit decisions count
    assert ("install", 1) not in test.world.events
    assert test.client.sent[1:] == [("report", 1, {}, False)]


def test_a_member_that_cannot_be_reached_is_suspected(test: RecoveryTest) -> None:
    def failing(watch: Any) -> None:
        raise Unreachable("no way to rank 1", [1])

    test.world.linking = failing
    test.client.receive(Revoke(0, {2: "died"}, False), members(1))
    until(lambda: ("report", 1, {}, False) in test.client.sent)
    assert ("suspect", 1, 1, "no way to rank 1") in test.client.sent
    logged = ("warning", "epoch 1 could not be connected: no way to rank 1")
    assert test.world.events.count(logged) == 1


def test_a_broken_link_waits_for_the_coordinators_decision(test: RecoveryTest) -> None:
    def failing(watch: Any) -> None:
        test.world.linking = lambda watch: None
        test.client.receive(Revoke(1, {1: "died"}, False), members(2, 2))
        raise PeerLost("rank 1 is gone", 1)

    test.world.linking = failing
    test.client.receive(Revoke(0, {2: "died"}, False), members(1))
    test.wait(2)
    assert not [message for message in test.client.sent if message[0] == "suspect"]
    logged = ("debug", "epoch 1 could not be connected: rank 1 is gone")
    assert logged in test.world.events  # the loss itself is shown already


def test_dismiss_fence_and_stop_end_the_rank(test: RecoveryTest) -> None:
    test.client.receive(
        ResizePending(3, 1, 0), Dismiss("bye"), Fence("silent"), Stop("few")
    )
    until(lambda: len(test.world.events) >= 6)
    update, bye, fenced, stopped = test.world.events[2:]
    assert (update, bye) == (("update", 3), ("dismissed", "bye"))
    assert fenced[0] is errors.Fenced
    assert errors.FENCED in fenced[1]
    assert stopped == (RingjaxError, "the job was stopped: few")


def test_a_request_to_leave_reaches_the_coordinator(test: RecoveryTest) -> None:
    test.recovery.leave()
    until(lambda: ("leaving",) in test.client.sent)


@pytest.mark.parametrize(
    "error",
    [ValueError("a mistake"), errors.OutOfDescriptors("world: 9 descriptors needed")],
)
def test_an_error_of_the_recovery_ends_the_rank(
    test: RecoveryTest, error: Exception
) -> None:
    def failing(watch: Any) -> None:
        raise error

    test.world.linking = failing
    test.client.receive(members(1))
    why = f"the recovery of this rank failed: {type(error).__name__}: {error}"
    until(lambda: ("broken", why) in test.world.events)
    assert not [message for message in test.client.sent if message[0] == "report"]
