"""Tests of epochs of an elastic world that fail while they are formed."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import until

from ringjax import _native
from ringjax.config import Config
from ringjax.control.member import Member
from ringjax.errors import PeerLost
from ringjax.membership.directives import EpochDirective
from ringjax.world.epoch import Epoch
from ringjax.world.rank_info import RankInfo
from ringjax.world.world import World


class EpochBuilder:
    """A fake that builds epochs with a heartbeat and then fails to connect links."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def build(self, members: EpochDirective, watch: Any, before: Any) -> Epoch:
        factory: Any = SimpleNamespace(epoch=members.epoch, members=members.members)
        epoch = Epoch(Config(), RankInfo.from_hosts(0, ["here"] * 3), factory)
        epoch.heartbeat = epoch._make_heartbeat([(1, self._control.detach())], [])
        return epoch

    def connect(self, *_: Any) -> None:
        raise PeerLost("rank 2 closed its connection", 2)


def test_an_abandoned_epoch_does_not_look_like_a_death() -> None:
    # Another member may have formed the epoch already. It must not take the end of this
    # rank's heartbeat for a death.
    mine, theirs = socket.socketpair()
    wakeup = os.eventfd(0, os.EFD_NONBLOCK)
    other = _native.Heartbeat(
        1, ["", ""], [(0, theirs.detach())], interval=0.05, timeout=60, notify=wakeup
    )
    builder = EpochBuilder(mine)
    world: Any = World.__new__(World)
    world.restart_pending, world.epoch_info, world._epoch, world._epoch_builder = (
        False,
        None,
        None,
        builder,
    )
    world.comm_table = SimpleNamespace(resilient={})
    everybody = tuple(Member(r, r, hostname="here") for r in range(3))
    order = EpochDirective(3, "repair", everybody, 0, (0, 1, 2), {}, {}, 1, {})

    def woken() -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(wakeup) > 0
        return False

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, wakeup)
        stack.callback(other.close)
        with pytest.raises(PeerLost, match="rank 2"):
            World.link(world, [order], None)
        until(woken)  # the other heartbeat has received the end
        assert other.lost() == []
