"""Tests of the sizes of the memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.link_ranks import Ranks, host_bytes, world

from ringjax import _native
from ringjax.links import shared_memory, sizes

__all__ = ["world"]  # a fixture


@pytest.mark.parametrize(
    ("hosts", "settings", "tiles"),
    [
        ((0, 0), {}, {8192}),
        ((0, 0, 0, 0, 0), {}, {8192}),
        ((0, 0, 1), {}, {0, None}),
        ((0, 1, 0, 1), {}, {8192}),
        ((0, 0, 1, 1), {"shm": False}, {None}),
        ((0, 0), {"tile_bytes": 0}, {0}),
        ((0, 0), {"shm": False}, {None}),
        ((0,), {}, {None}),
    ],
)
def test_only_ranks_of_even_hosts_have_a_segment(
    world: Callable[..., Ranks],
    hosts: tuple[int, ...],
    settings: dict[str, Any],
    tiles: set[int | None],
) -> None:
    built = world(hosts, **{"tile_bytes": 8192, **settings}).build()
    assert {links.memory and links.memory[2] for links in built} == tiles


def test_many_ranks_get_smaller_rings_and_tiles(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "_MAX_MAPPED", 1 << 20)
    monkeypatch.setattr(sizes, "_MAX_SEGMENT", 1 << 20)
    for links in world((0,) * 5, ring_bytes=1 << 18, tile_bytes=1 << 19).build():
        assert links.memory is not None
        fd, ring, tile, _ = links.memory
        assert (ring, tile) == (1 << 17, 1 << 17)  # 8 rings, 5 tiles
        assert shared_memory.is_valid(fd, host_bytes(5, ring, tile)[1])


@pytest.mark.parametrize("ranks", [2, 16, 32, 64, 128, 256, 512])
def test_the_memory_of_a_host_is_bounded(ranks: int) -> None:
    ring = sizes.ring_bytes(1 << 20, ranks, _native.host_bytes)
    tile = sizes.tile_bytes(1 << 19, ranks, _native.host_bytes)
    fixed, size = _native.host_bytes(ranks, ring, tile)
    assert size - fixed <= (512 << 20 if ranks <= 256 else 2 << 30)
    assert fixed <= (64 << 20 if ranks <= 256 else 128 << 20)
    assert ring >= 1 << 12
    assert (ring, tile) == (1 << 20, 1 << 19) or ranks > 8
