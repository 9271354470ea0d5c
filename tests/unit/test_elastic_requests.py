"""Tests of pause requests to the coordinator. A fake world simulates the events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ringjax.errors import PeerLost
from ringjax.runtime import elastic_requests, lifecycle


class World:
    """A fake elastic world in epoch 5. Each wait calls the next of `events`."""

    def __init__(self, *events: Callable[[World], None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.epoch_info = SimpleNamespace(epoch=5)
        self.resizes = 0
        self.dismissed = self.restart_pending = False
        self.local_devices, self.devices = None, self  # no device to connect
        self.client = self
        self.said: list[tuple[int, int]] = []
        self._events = list(events)
        self.elastic = True

    @property
    def epoch_number(self) -> int:
        return self.epoch_info.epoch

    def pause(self, epoch: int, number: int, *_: Any) -> None:
        self.said.append((epoch, number))

    def close(self) -> None:
        pass

    def epoch_report(self) -> tuple[dict[int, Any], int, bool]:
        return {}, 1, False

    def wait_for_next_epoch(self, before: int) -> None:
        while not (
            self.dismissed or self.restart_pending or self.epoch_info.epoch > before
        ):
            self._events.pop(0)(self)


def pause(world: World, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(lifecycle, "_world", world)
    return elastic_requests.pause(3)


def repair(world: World) -> None:
    world.epoch_info = SimpleNamespace(epoch=world.epoch_info.epoch + 1)


def resize(world: World) -> None:
    repair(world)
    world.resizes += 1


def restart(world: World) -> None:
    repair(world)
    world.restart_pending = True


def dismiss(world: World) -> None:
    world.dismissed = True


def test_a_pause_is_requested_again_after_a_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(repair, repair, resize)
    assert pause(world, monkeypatch)
    assert world.said == [(5, 3), (6, 3), (7, 3)]


def test_a_loss_after_a_resize_ends_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(lambda w: (resize(w), repair(w)))
    assert pause(world, monkeypatch)
    assert world.said == [(5, 3)]


def test_a_dismissed_rank_does_not_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(dismiss)
    assert not pause(world, monkeypatch)


def test_no_pause_is_requested_before_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The coordinator would take the request for one of the new epoch's first pause.
    world = World()
    restart(world)
    with pytest.raises(PeerLost, match="starts again"):
        pause(world, monkeypatch)
    assert world.said == []
    world = World(lambda w: (repair(w), restart(w)))
    with pytest.raises(PeerLost, match="starts again"):
        pause(world, monkeypatch)
    assert world.said == [(5, 3)]
