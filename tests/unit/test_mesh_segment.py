"""Tests of the memory segment that all ranks of a host map."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.mesh_ranks import Ranks, world

from ringjax import _native
from ringjax.links import shared_memory, sizes
from ringjax.links.mesh import LinkDescriptors

__all__ = ["world"]  # a fixture


def inode(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def segments(meshes: Sequence[LinkDescriptors]) -> list[tuple[int, int, list[int]]]:
    found = [mesh.segment for mesh in meshes]
    assert None not in found
    return [segment for segment in found if segment is not None]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_one_host_map_one_segment(
    world: Callable[..., Ranks], size: int
) -> None:
    meshes = world((0,) * size, tile_bytes=8192).build()
    assert len({inode(memory) for memory, _, _ in segments(meshes)}) == 1
    for rank, (fd, tile, bells) in enumerate(segments(meshes)):
        assert (tile, len(bells), bells[rank]) == (8192, size, -1)
        assert shared_memory.is_valid(fd, size * 8192)
        for peer in range(size):
            if peer != rank:  # the peer wrote it
                os.eventfd_write(bells[peer], rank + 1)
    for rank, mesh in enumerate(meshes):
        others = sum(peer + 1 for peer in range(size) if peer != rank)
        assert os.eventfd_read(mesh.doorbell) == others


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [
        ((0, 0, 1), {}),
        ((0, 0), {"tile_bytes": 0}),
        ((0, 0), {"shm": False}),
        ((0,), {}),
    ],
)
def test_jobs_without_a_segment(
    world: Callable[..., Ranks], hosts: tuple[int, ...], settings: dict[str, Any]
) -> None:
    ranks = world(hosts, **settings)
    assert [mesh.segment for mesh in ranks.build()] == [None] * ranks.size


def test_missing_memory_for_a_segment_causes_one_warning(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world((0, 0, 0), tile_bytes=8192)
    make = shared_memory.create

    def scarce(size: int, left: int | None = None) -> int:
        if size == 3 * 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(size)

    monkeypatch.setattr(shared_memory, "create", scarce)
    meshes = ranks.build()
    assert [mesh.segment for mesh in meshes] == [None] * 3
    assert {link[0] for mesh in meshes for link in mesh.links} == {"shm"}
    assert ranks.log == [
        "warning: world: 24576 bytes of shared memory for all ranks cannot be had "
        "(No space left on device): allreduce takes the rings, which is slower"
    ]


def test_many_ranks_get_smaller_rings_and_tiles(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringjax.links.sizes._MAX_MAPPED", 1 << 20)
    meshes = world((0,) * 5, ring_bytes=1 << 18, tile_bytes=1 << 19).build()
    for mesh, (_, tile, _) in zip(meshes, segments(meshes), strict=True):
        assert {link[4] for link in mesh.links} == {1 << 17}  # 8 rings
        assert tile == 1 << 17  # 5 tiles


@pytest.mark.parametrize("ranks", [2, 16, 32, 64, 128, 256, 512])
def test_the_memory_of_a_host_is_bounded(ranks: int) -> None:
    ring = sizes.ring_bytes(1 << 20, ranks, _native.shm_bytes)
    tile = sizes.tile_bytes(1 << 19, ranks, _native.segment_bytes)
    rings = ranks * (ranks - 1) // 2 * _native.shm_bytes(ring)
    assert rings <= (512 << 20 if ranks <= 256 else 2 << 30)
    assert _native.segment_bytes(ranks, tile) <= (
        64 << 20 if ranks <= 256 else 128 << 20
    )
    assert ring >= 1 << 12
    assert (ring, tile) == (1 << 20, 1 << 19) or ranks > 8
