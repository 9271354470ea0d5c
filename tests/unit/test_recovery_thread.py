"""The recovery thread against a coordinator and a world that are played by the test."""

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
    everybody = tuple(Member(r, "", {}, r) for r in range(size))
    return EpochDirective(epoch, kind, everybody, 0, tuple(range(size)), {}, {}, 1, {})


class Line:
    """Plays the client of the coordinator."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._orders: list[Directive] = []
        self.said: list[tuple[Any, ...]] = []

    def hear(self, *orders: Directive) -> None:
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
        self.said.append(("report", epoch, dict(lines), more["restart"]))

    def suspect(self, epoch: int, rank: int, text: str) -> None:
        self.said.append(("suspect", epoch, rank, text))

    def request_leave(self) -> None:
        self.said.append(("leaving",))

    def report_failure(self, text: str) -> None:
        self.said.append(("failure", text))

    def close(self) -> None:
        os.close(self._fd)


class Epoch:
    """Has a heartbeat that loses whom the test names."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rank_info = RankInfo.from_hosts(0, ["here"] * 3)
        self.dead: list[tuple[int, str]] = []

    def lost(self) -> list[tuple[int, str]]:
        return self.dead


class World:
    """Installs epochs, and links them when the test lets it."""

    def __init__(self) -> None:
        self.current_epoch: Any = None
        self.linking: Callable[[Any], None] = lambda watch: None
        self.completing: Callable[[], None] = lambda: None
        self.story: list[Any] = []
        self.heard: list[int] = []

    def halt(self, text: str, rank: int) -> dict[int, tuple[int, int, bool]]:
        self.story.append(("halt", text, rank))
        return {0: (5, 6, True)}

    def epoch_report(self) -> tuple[dict[int, Sequence[int]], int, bool]:
        return {}, 1, False

    def link(self, heard: Sequence[EpochDirective], watch: Any) -> Any:
        self.linking(watch)
        return Epoch(heard[-1].epoch)

    def complete(self, members: EpochDirective) -> None:
        self.completing()

    def install(self, epoch: Any, heard: Sequence[EpochDirective]) -> None:
        self.heard = [m.epoch for m in heard]
        self.current_epoch = epoch
        self.story.append(("install", epoch.number))

    @property
    def pending_update(self) -> int:
        return 0

    @pending_update.setter
    def pending_update(self, update: int) -> None:
        self.story.append(("update", update))

    def dismiss(self, text: str) -> None:
        self.story.append(("dismissed", text))

    def end(self, kind: type[RingjaxError], text: str) -> None:
        self.story.append((kind, text))

    def on_thread_failure(self, text: str) -> None:
        self.story.append(("broken", text))

    def log(self, level: str, text: str) -> None:
        pass


class Stage:
    """All of them, in the first epoch."""

    def __init__(self) -> None:
        self.world, self.line = World(), Line()
        self.recovery = Recovery(self.world, self.line)  # type: ignore[arg-type]
        self.recovery.start(members(0, kind="start"))
        self.wait(0)

    def wait(self, epoch: int) -> None:
        until(lambda: ("install", epoch) in self.world.story)

    def lose(self, rank: int) -> None:
        self.world.current_epoch.dead = [(rank, "died")]
        os.eventfd_write(self.recovery.notify_fd, 1)


@pytest.fixture
def stage() -> Iterator[Stage]:
    found = Stage()
    yield found
    found.recovery.close()
    found.line.close()


def test_a_loss_is_reported_at_once_and_once(stage: Stage) -> None:
    stage.lose(2)
    until(lambda: len(stage.line.said) == 2)
    stage.line.hear(Revoke(0, {2: "died"}, False), members(1))
    stage.wait(1)
    assert stage.line.said == [
        ("suspect", 0, 2, "died"),
        ("report", 0, {0: (5, 6, True)}, False),
    ]
    assert ("halt", "rank 2 died", 2) in stage.world.story


def test_a_revoke_alone_stops_the_epoch(stage: Stage) -> None:
    stage.line.hear(Revoke(0, {}, True))
    until(lambda: bool(stage.line.said))
    assert ("halt", "another rank asked to start again", -1) in stage.world.story
    stage.line.hear(members(1, kind="restart"))
    stage.wait(1)
    assert stage.world.heard == [1]


def test_an_accusation_comes_before_the_report_though_a_revoke_overtakes_it(
    stage: Stage,
) -> None:
    """The program asks to start again, another thread tells why: in any order."""
    stage.world.current_epoch.dead = [(1, "has not called"), (2, "died")]
    stage.line.hear(Revoke(0, {2: "died"}, True))
    until(lambda: len(stage.line.said) == 2)
    assert stage.line.said == [
        ("suspect", 0, 1, "has not called"),
        ("report", 0, {0: (5, 6, True)}, False),
    ]


def test_an_epoch_that_is_revoked_while_it_forms_is_given_up(stage: Stage) -> None:
    began = threading.Event()

    def linking(watch: Any) -> None:
        began.set()
        while True:  # links/mesh.py asks in the same way
            watch.departed_ranks()
            time.sleep(0.002)

    stage.world.linking = linking
    stage.line.hear(Revoke(0, {2: "died"}, False), members(1))
    assert began.wait(LONG)
    stage.world.linking = lambda watch: None
    stage.line.hear(Revoke(1, {1: "died, too"}, False), members(3, 1))
    stage.wait(3)
    assert stage.world.heard == [1, 3]  # both verdicts count
    assert ("install", 1) not in stage.world.story
    assert stage.line.said[1:] == [("report", 1, {}, False)]


def test_a_member_that_cannot_be_reached_is_suspected(stage: Stage) -> None:
    def failing(watch: Any) -> None:
        raise Unreachable("no way to rank 1", [1])

    stage.world.linking = failing
    stage.line.hear(Revoke(0, {2: "died"}, False), members(1))
    until(lambda: ("report", 1, {}, False) in stage.line.said)
    assert ("suspect", 1, 1, "no way to rank 1") in stage.line.said


def test_a_link_that_breaks_waits_for_what_the_coordinator_says(stage: Stage) -> None:
    def failing(watch: Any) -> None:
        stage.world.linking = lambda watch: None
        stage.line.hear(Revoke(1, {1: "died"}, False), members(2, 2))
        raise PeerLost("rank 1 is gone", 1)

    stage.world.linking = failing
    stage.line.hear(Revoke(0, {2: "died"}, False), members(1))
    stage.wait(2)
    assert not [said for said in stage.line.said if said[0] == "suspect"]


def test_the_end_comes_in_three_kinds(stage: Stage) -> None:
    stage.line.hear(
        ResizePending(3, 1, 0), Dismiss("bye"), Fence("silent"), Stop("few")
    )
    until(lambda: len(stage.world.story) >= 6)
    update, bye, fenced, stopped = stage.world.story[2:]
    assert (update, bye) == (("update", 3), ("dismissed", "bye"))
    assert fenced[0] is errors.Fenced
    assert errors.FENCED in fenced[1]
    assert stopped == (RingjaxError, "the job was stopped: few")


def test_a_request_to_leave_reaches_the_coordinator(stage: Stage) -> None:
    stage.recovery.leave()
    until(lambda: ("leaving",) in stage.line.said)


@pytest.mark.parametrize(
    "error",
    [ValueError("a mistake"), errors.OutOfDescriptors("world: 9 descriptors needed")],
)
def test_an_error_of_the_recovery_ends_the_rank(stage: Stage, error: Exception) -> None:
    def failing(watch: Any) -> None:
        raise error

    stage.world.linking = failing
    stage.line.hear(members(1))
    why = f"the recovery of this rank failed: {type(error).__name__}: {error}"
    until(lambda: ("broken", why) in stage.world.story)
    assert not [said for said in stage.line.said if said[0] == "report"]
