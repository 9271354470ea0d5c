"""Epochs of an elastic world that fail before they are formed."""

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
    """Forms epochs with a heartbeat, whose links then break."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def build(self, members: EpochDirective, watch: Any, before: Any) -> Epoch:
        factory: Any = SimpleNamespace(epoch=members.epoch, members=members.members)
        epoch = Epoch(Config(), RankInfo.from_hosts(0, ["here"] * 3), factory)
        epoch.heartbeat = epoch._make_heartbeat([(1, self._control.detach())], [])
        return epoch

    def connect(self, *_: Any) -> None:
        raise PeerLost("rank 2 closed its connection", 2)


def test_an_epoch_that_is_given_up_is_no_death_of_this_rank() -> None:
    # Another member may have formed the epoch and not know yet that it has ended.
    mine, theirs = socket.socketpair()
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    other = _native.Heartbeat(
        1, ["", ""], [(0, theirs.detach())], interval=0.05, timeout=60, notify=bell
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
    everybody = tuple(Member(r, "", {"hostname": "here"}, r) for r in range(3))
    order = EpochDirective(3, "repair", everybody, 0, (0, 1, 2), {}, {}, 1, {})

    def rung() -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(bell) > 0
        return False

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, bell)
        stack.callback(other.close)
        with pytest.raises(PeerLost, match="rank 2"):
            World.link(world, [order], None)
        until(rung)  # the heartbeat has received the end
        assert other.lost() == []
