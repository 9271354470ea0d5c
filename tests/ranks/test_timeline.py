"""The timeline of named operations: what is in the file, when, and who writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_worker import World

import ringjax
from ringjax import eager, runtime, timeline

pytestmark = pytest.mark.launch("core")


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def rows(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The events of each row by its title."""
    titles = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    return {
        title: [e for e in found if e["pid"] == pid and e["ph"] != "M"]
        for pid, title in titles.items()
    }


def shared_path(world: World, folder: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    everyone = runtime.current("test").exchange(str(folder / "trace.json"), "a path")
    return Path(everyone[0])


@pytest.mark.ranks(1, 2, 3)
def test_an_operation_is_negotiated_and_then_runs(world: World, tmp_path: Path) -> None:
    path = shared_path(world, tmp_path)
    timeline.start_timeline(path, mark_cycles=True)
    eager.barrier()  # nobody submits before rank 0 records
    for _ in range(3):
        eager.allreduce(np.ones(4, np.float32), name='a "quoted" name', op=ringjax.Sum)
    eager.barrier()
    timeline.stop_timeline()
    eager.barrier()
    if world.rank != 0:
        return
    found = [e | {"name": e.get("name", "")} for e in events(path)]
    row = rows(found)['allreduce.a "quoted" name']
    spans = [(e["ph"], e["name"]) for e in row if e["ph"] in "BE"]
    assert spans == 3 * [
        ("B", "NEGOTIATE_ALLREDUCE"), ("E", ""), ("B", "ALLREDUCE"), ("E", "")
    ]  # fmt: skip
    ready = [e["name"] for e in row if e["ph"] == "X"]
    assert sorted(ready) == sorted(3 * [str(r) for r in range(world.size)])
    assert [e["ts"] for e in row] == sorted(e["ts"] for e in row)
    ends = [e["args"] for e in row if "args" in e]
    assert ends == 3 * [{"operation": "allreduce 'a \"quoted\" name' (f32[4], SUM)"}]
    assert any(e["name"] == "CYCLE_START" for e in found)


@pytest.mark.ranks(2)
def test_the_file_is_valid_while_it_grows_and_ends_with_stop(
    world: World, tmp_path: Path
) -> None:
    path = shared_path(world, tmp_path)
    timeline.start_timeline(path)
    eager.barrier()
    if world.rank == 0:
        assert isinstance(events(path), list)
    timeline.stop_timeline()
    eager.barrier()  # nobody submits before rank 0 has stopped
    eager.allreduce(np.ones(1), name="after")
    timeline.stop_timeline()  # more than once has no effect
    if world.rank == 0:
        assert "after" not in path.read_text()
        assert "CYCLE_START" not in path.read_text()


@pytest.mark.ranks(2)
def test_a_failed_operation_shows_why(world: World, tmp_path: Path) -> None:
    path = shared_path(world, tmp_path)
    timeline.start_timeline(path)
    with pytest.raises(ringjax.errors.Mismatch):
        eager.allreduce(np.ones(1 + world.rank), name="bad")
    timeline.stop_timeline()
    if world.rank == 0:
        found = [e | {"name": e.get("name", "")} for e in events(path)]
        assert "Mismatched shapes" in rows(found)["allreduce.bad"][-1]["args"]["error"]


@pytest.mark.ranks(2)
def test_only_rank_0_needs_a_place_to_write(world: World, tmp_path: Path) -> None:
    path = tmp_path / "no such folder" / "trace.json"
    if world.rank == 0:
        with pytest.raises(ValueError, match="no such folder"):
            timeline.start_timeline(path)
    else:
        timeline.start_timeline(path)
    assert not os.path.exists(path)


@pytest.mark.ranks(2, isolated=True, env={"HOROVOD_TIMELINE_MARK_CYCLES": "1"})
def test_a_variable_begins_one_at_init(tmp_path: Path) -> None:
    os.environ["HOROVOD_TIMELINE"] = str(tmp_path / "trace.json")
    ringjax.init()
    eager.allreduce(np.ones(3), name="x")
    rank = ringjax.rank()
    ringjax.shutdown()
    if rank == 0:
        text = (tmp_path / "trace.json").read_text()
        assert "allreduce.x" in text
        assert "CYCLE_START" in text
