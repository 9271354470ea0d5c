"""The timeline: the content of the file, and when rank 0 writes.

jax/test_compiled_timeline.py tests the calls of compiled programs.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_worker import World

import ringjax
from ringjax import _native, eager, runtime, timeline

pytestmark = pytest.mark.launch("core")


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def rows(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the events of each row by the title of the row."""
    titles = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    return {
        title: [e for e in found if e["pid"] == pid and e["ph"] != "M"]
        for pid, title in titles.items()
    }


def shared_path(world: World, folder: Path) -> Path:
    """Returns a path in the folder of rank 0, on all ranks."""
    everyone = runtime.current("test").exchange(str(folder / "trace.json"), "a path")
    return Path(everyone[0])


@pytest.mark.ranks(1, 2, 3)
def test_an_operation_is_negotiated_and_then_runs(world: World, tmp_path: Path) -> None:
    path = shared_path(world, tmp_path)
    timeline.start_timeline(path, mark_cycles=True)
    eager.barrier()  # no rank submits before rank 0 records
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
    eager.barrier()  # no rank submits before rank 0 has stopped
    eager.allreduce(np.ones(1), name="after")
    timeline.stop_timeline()  # a second call has no effect
    if world.rank == 0:
        assert "after" not in path.read_text()
        assert "CYCLE_START" not in path.read_text()


@pytest.mark.ranks(2)
def test_the_timeline_shows_why_an_operation_failed(
    world: World, tmp_path: Path
) -> None:
    path = shared_path(world, tmp_path)
    timeline.start_timeline(path)
    with pytest.raises(ringjax.errors.Mismatch):
        eager.allreduce(np.ones(1 + world.rank), name="bad")
    timeline.stop_timeline()
    if world.rank == 0:
        found = [e | {"name": e.get("name", "")} for e in events(path)]
        assert "Mismatched shapes" in rows(found)["allreduce.bad"][-1]["args"]["error"]


@pytest.mark.ranks(2)
def test_an_empty_timeline_says_why(world: World, tmp_path: Path) -> None:
    path = shared_path(world, tmp_path)
    eager.barrier(name="together")
    timeline.start_timeline(path)
    if world.rank == 0:
        head, note = events(path)
        assert head["name"] == "start_time_since_epoch_in_micros"
        assert "ended no collective" in note["name"]
    eager.barrier(name="now")
    timeline.stop_timeline()
    if world.rank == 0:
        assert "ended no collective" not in path.read_text()
        assert events(path)


def make_calls(path: Path, calls: int, most_bytes: int) -> None:
    """Makes calls of different sizes on a communicator of one rank."""
    native = _native.Timeline(str(path), False, most_bytes=most_bytes)
    recorder = _native.Recorder(8, "rank 0")
    recorder.tell(native)
    communicator = _native.Communicator(
        id=0, name="world", job=0, epoch=0, rank=0, hosts=[0], members=[0], links=[],
        options={"recorder": recorder},
    )  # fmt: skip
    for number in range(calls):
        x = np.ones(number + 1, np.float32)
        communicator.execute(
            _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"], [x], [x]
        )
    communicator.close()
    recorder.tell(None)
    native.close()


def sizes(found: list[dict[str, Any]]) -> list[int]:
    """Returns the sizes, in bytes, of all completed calls in a timeline."""
    return [e["args"]["bytes"] for e in found if "bytes" in e.get("args", {})]


def test_a_limited_timeline_keeps_the_newest_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    make_calls(path, calls=200, most_bytes=8192)
    parts = [events(path.with_name("trace.json.1")), events(path)]
    for found in parts:
        assert found[0]["name"] == "start_time_since_epoch_in_micros"
        assert any(e["name"] == "process_name" for e in found if e["ph"] == "M")
    kept = sizes(parts[0]) + sizes(parts[1])
    assert 2 < len(kept) < 100
    assert kept == [4 * n for n in range(201 - len(kept), 201)]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 8192 + 1024


def test_a_full_disk_leaves_a_valid_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (6000, before[1])
    )  # Python ignores SIGXFSZ
    try:
        make_calls(path, calls=300, most_bytes=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = events(path)
    assert 0 < path.stat().st_size <= 6000
    # Events are written in batches. A batch for which the disk has no room is dropped.
    assert sizes(found) == sorted(set(sizes(found)))


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
def test_an_environment_variable_starts_the_timeline_at_init(tmp_path: Path) -> None:
    os.environ["HOROVOD_TIMELINE"] = str(tmp_path / "trace.json")
    ringjax.init()
    eager.allreduce(np.ones(3), name="x")
    rank = ringjax.rank()
    ringjax.shutdown()
    if rank == 0:
        text = (tmp_path / "trace.json").read_text()
        assert "allreduce.x" in text
        assert "CYCLE_START" in text
