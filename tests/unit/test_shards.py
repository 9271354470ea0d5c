"""Tests of the numbering of shards, and of calls over shards, with fake devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from ringjax.xla import shards
from ringjax.xla.program import Program


class Device(NamedTuple):
    id: int
    local_hardware_id: int
    process_index: int


DEVICES = [Device(n + 8, n, jax.process_index()) for n in (2, 0, 1, 3)]


def sharding(*places: tuple[slice, ...]) -> Any:
    """Makes a fake sharding; `places` holds the index of the shard of each device."""
    indices = dict(zip(DEVICES, places, strict=True)) if places else {}
    return SimpleNamespace(devices_indices_map=lambda shape: indices)


ALL = slice(None)
LOW, HIGH = slice(0, 3), slice(3, 6)


def test_shards_are_numbered_by_their_place_in_the_tensor() -> None:
    rows = sharding((HIGH, ALL), (LOW, ALL), (HIGH, ALL), (LOW, ALL))
    whole = sharding(*[(ALL, ALL)] * 4)
    program = Program("cpu", tuple(DEVICES), None)
    found = shards.of_shardings(program, [(6, 2), (6, 2)], [rows, whole])
    assert found.devices == (10, 8, 9, 11)
    assert found.names == "4 devices (0, 1, 2, 3)"
    assert found.of == ((1, 0, 1, 0), (0, 0, 0, 0))
    assert found.parts == (("[0:3,0:2]", "[3:6,0:2]"), ("",))
    assert found.select([1]).of == ((0, 0, 0, 0),)


@pytest.mark.parametrize(
    ("varying", "of", "parts"),
    [
        (None, (0, 1, 2, 3), ("@a=0,b=0", "@a=0,b=1", "@a=1,b=0", "@a=1,b=1")),
        (frozenset("a"), (0, 0, 1, 1), ("@a=0", "@a=1")),
        (frozenset("b"), (0, 1, 0, 1), ("@b=0", "@b=1")),
        (frozenset(), (0, 0, 0, 0), ("",)),
    ],
)
def test_shards_in_shard_map_are_numbered_by_mesh_position(
    varying: Any, of: Any, parts: Any
) -> None:
    devices = np.empty(4, object)
    devices[:] = DEVICES
    mesh: Any = SimpleNamespace(devices=devices.reshape(2, 2), axis_names=("a", "b"))
    program = Program("cpu", tuple(DEVICES), mesh)
    found = shards.of_mesh(program, [varying])
    assert (found.of, found.parts) == ((of,), (parts,))


def test_attributes_of_tensors_become_attributes_of_shards() -> None:
    found = shards.Shards(
        (8, 9), "2 devices (0, 1)", ((0, 1), (0, 0)), (("@a=0", "@a=1"), ("",))
    )
    whole = {"names": "x\ny", "counts": (1, 2, 3, 4), "op": 0}
    cut = found.merged_attributes(whole)
    assert cut["names"] == "x@a=0\nx@a=1\ny"
    assert cut["counts"] == (1, 2, 1, 2, 3, 4)
    assert cut["devices"] == (8, 9) and cut["shards"] == (0, 1, 0, 0)
    assert cut["partition"].startswith("2 devices (0, 1)\n")
    other = found._replace(parts=(("@b=0", "@b=1"), ("",))).merged_attributes(whole)
    assert other["partition"] != cut["partition"]
    assert (
        found.select([]).merged_attributes({"names": "", "counts": ()})["counts"] == ()
    )
