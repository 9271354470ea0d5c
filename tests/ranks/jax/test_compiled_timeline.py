"""Calls of compiled programs in the timeline, beside named operations."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.rank_worker import World

import ringjax
from ringjax import eager, runtime, timeline

pytestmark = pytest.mark.launch("jax")


@jax.jit
def _reduce(x: jax.Array) -> jax.Array:
    return ringjax.allreduce(x, name="y", op=ringjax.Sum)


@pytest.mark.ranks(1, 2, 3)
def test_the_timeline_contains_calls_of_compiled_programs(
    world: World, tmp_path: Path
) -> None:
    mine = str(tmp_path / "trace.json")
    path = Path(runtime.current("test").exchange(mine, "a path")[0])
    x = jnp.ones(5)
    jax.block_until_ready(_reduce(x))
    timeline.start_timeline(path)
    eager.barrier(name="recorded")
    for _ in range(3):
        jax.block_until_ready(_reduce(x))
    timeline.stop_timeline()
    jax.block_until_ready(_reduce(x))
    if world.rank != 0:
        return
    found = json.loads(path.read_text())
    (row,) = [
        e["pid"] for e in found
        if e.get("args", {}).get("name") == "allreduce.y (compiled)"
    ]  # fmt: skip
    events = [e for e in found if e["pid"] == row and e["ph"] != "M"]
    assert [(e["ph"], e.get("name")) for e in events] == 3 * [
        ("B", "NEGOTIATE_ALLREDUCE"), ("X", "0"), ("E", None),
        ("B", "ALLREDUCE"), ("E", None),
    ]  # fmt: skip
    times = [e["ts"] for e in events]
    assert times == sorted(times)
    ends = [e["args"] for e in events if "args" in e]
    assert [e["bytes"] for e in ends] == 3 * [20]
    assert len({e["seq"] for e in ends}) == 3
    if world.size > 1:
        assert all(e["algorithm"] for e in ends)
