"""Records of JAX's own collectives: timeline, statistics, top, metrics, file of calls.

The programs call `ringjax.init` never, or before or after their first collective.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from support.jax_processes import HEAD, run, run_ok, started
from support.launch import StartJob
from support.monitored_job import MonitoredJob
from support.waiting import LONG

from ringjax.profile import parts
from ringjax.world.groups import bind_free_port

# Processes are started anew, and import JAX, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)

# Each collective of JAX, by its name, with the bytes that two processes record for 8
# float32 of each.
CALLS = """
import ringjax
value = np.ones((2, 8), np.float32)
ring = [(0, 1), (1, 0)]
calls = dict(
    psum=lambda x: lax.psum(x, "p"),
    pmax=lambda x: lax.pmax(x, "p"),
    pmin=lambda x: lax.pmin(x, "p"),
    all_gather=lambda x: lax.all_gather(x, "p"),
    psum_scatter=lambda x: lax.psum_scatter(x[0], "p", tiled=True)[None],
    ppermute=lambda x: lax.ppermute(x, "p", ring),
    all_to_all=lambda x: lax.all_to_all(x, "p", 1, 1, tiled=True),
)

def call_all():
    for function in calls.values():
        on(function, value)
"""
BYTES = {"psum": 32, "pmax": 32, "pmin": 32, "all_gather": 64, "psum_scatter": 32}
BYTES |= {"ppermute": 32, "all_to_all": 16}


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the events of each row of a timeline by the title of the row."""
    found = json.loads(path.read_text())
    titles = {
        e["pid"]: e["args"]["name"] for e in found if e.get("name") == "process_name"
    }
    return {
        title: [e for e in found if e["pid"] == pid and e["ph"] != "M"]
        for pid, title in titles.items()
    }


def test_the_timeline_has_a_row_for_each_operation_of_jax(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    run_ok(
        CALLS + "for _ in range(3):\n    call_all()",
        2,
        *({"RINGJAX_TIMELINE": str(path)} for path in paths),
    )
    assert not paths[1].exists()  # process 0 alone writes one
    found = rows(paths[0])
    assert list(found) == [f"{op} (JAX's processes 0, 1)" for op in BYTES]
    for op, size in BYTES.items():
        events = found[f"{op} (JAX's processes 0, 1)"]
        if op == "psum":
            events = events[5:]  # a sum of one number connects the processes
        spans = [(e["ph"], e.get("name")) for e in events if e["ph"] in "BE"]
        negotiated = ("B", f"NEGOTIATE_{op.upper()}"), ("E", None)
        assert spans == 3 * [*negotiated, ("B", op.upper()), ("E", None)]
        assert [e["args"]["bytes"] for e in events if "args" in e] == [size] * 3


def test_the_timeline_continues_after_init(tmp_path: Path) -> None:
    # Without a launcher each process is a job of its own for `init`, with a rank 0.
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    lines = """
    call_all()
    ringjax.init()
    ringjax.eager.allreduce(np.ones(3), name="own")
    call_all()
    ringjax.shutdown()
    call_all()
    """
    run_ok(
        CALLS + dedent(lines), 2, *({"RINGJAX_TIMELINE": str(path)} for path in paths)
    )
    first, second = map(rows, paths)
    for found, times in (first, 2), (second, 1):
        assert "allreduce.own" in found
        ends = [e for e in found["pmax (JAX's processes 0, 1)"] if "args" in e]
        assert len(ends) == times


def test_statistics_have_jax_names_with_and_without_init() -> None:
    lines = """
    def check(times, rank, size):
        seen = ringjax.stats(buckets=True)
        assert (seen["rank"], seen["size"]) == (rank, size)
        everybody = seen["process_sets"][0]["jax"]
        assert set(everybody) == set(calls)
        for op, sums in everybody.items():
            # One more psum has connected the processes.
            assert sums["calls"] == times + (op == "psum"), (op, sums)
            assert sums["failures"] == 0
            assert sum(sums["move_histogram"]) == sums["calls"]
        assert len(seen["buckets"]) >= len(calls)
        last = [c for c in ringjax.recent_calls() if c["lane"] == "jax"][-1]
        assert (last["op"], last["name"]) == ("all_to_all", "JAX's processes 0, 1")
        assert (last["bytes"], last["named"], last["ok"]) == (16, False, True)
        assert last["entered"] == last["agreed"] <= last["done"] <= time.monotonic()

    call_all()
    check(1, rank, 2)
    ringjax.write_scalars(lambda *_: None, 0)
    call_all()
    scalars = ringjax.write_scalars(lambda *_: None, 1)
    assert scalars["calls"] > 0 and scalars["busbw"] > 0
    ringjax.init()
    ringjax.eager.allreduce(np.ones(3), name="own")
    call_all()
    check(3, 0, 1)
    assert ringjax.stats()["process_sets"][0]["named"]["allreduce"]["calls"] == 1
    """
    run_ok(CALLS + dedent(lines), 2)


def test_groups_of_some_processes_have_a_number_of_their_own() -> None:
    lines = """
    import ringjax
    if rank < 2:
        value = np.ones((2, 1), np.float32)
        for some in devices[:2], devices[1::-1]:
            on(lambda x: lax.psum(x, "p"), value, some)
        calls = [c for c in ringjax.recent_calls() if c["bytes"] == 4]
        print(sorted({(c["set"], c["name"]) for c in calls}))
    """
    (first, _), (second, _), _ = run(lines, 3)
    assert first == second
    sets = dict(reversed(pair) for pair in eval(first))
    assert set(sets) == {"JAX's processes 0, 1", "JAX's processes 1, 0"}
    assert 0 not in sets.values() and len(set(sets.values())) == 2


def test_the_last_calls_are_in_a_file_after_a_loss(tmp_path: Path) -> None:
    lines = """
    call_all()
    if rank == 1:
        os._exit(3)
    error_of(lambda: [on(calls["psum"], value) for _ in range(10**9)])
    os._exit(0)  # without JAX's barrier at the exit
    """
    kept = {"RINGJAX_RECORD_DIR": str(tmp_path)}
    with started(CALLS + dedent(lines), 2, kept, kept) as (first, second):
        second.wait(100)
        _, errors = first.communicate(timeout=100)
    assert "[ringjax JAX process 0] its last calls are in" in errors
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-JAXprocess0.jsonl")
    head, *calls = map(json.loads, file.read_text().splitlines())
    assert "rank 1" in head["reason"]
    assert {call["op"] for call in calls} == set(BYTES)
    assert {call["lane"] for call in calls} == {"jax"}


# Process 1 is late in every step. The program ends when the file $FOLDER/end exists.
STEPS = (
    """
import os, sys
sys.argv[1:] = [os.environ[name] for name in ("RINGJAX_RANK", "RINGJAX_SIZE", "WHERE")]
"""
    + HEAD
    + """
total = program(lambda x: lax.psum(x, "p"))
highest = program(lambda x: lax.pmax(x, "p"))
ones = array(np.ones((size, 50_000), np.float32))

def load():
    time.sleep(0.02)  # a slow input on rank 1, the straggler that top names

def step():
    time.sleep(0.005)  # the work of a step on each rank
    if rank == 1:
        load()
    local(total(ones))
    over = np.full((size, 1), os.path.exists(os.environ["FOLDER"] + "/end"), np.float32)
    return bool(local(highest(array(over)))[0, 0])

def steps():
    while not step():
        pass
"""
)
INIT = """
import ringjax
ringjax.init()
ringjax.eager.allreduce(np.ones(3), name="own")
"""


@pytest.fixture
def watched(start_job: StartJob, tmp_path: Path) -> MonitoredJob:
    return MonitoredJob(start_job, tmp_path)


@contextlib.contextmanager
def begun(watched: MonitoredJob, script: str, *options: str) -> Iterator[None]:
    """Starts the script on two ranks of ringrun."""
    with bind_free_port() as reserved:
        where = f"127.0.0.1:{reserved.getsockname()[1]}"
        watched.start(2, script, "--jax-collectives", *options, WHERE=where)
        yield


@pytest.mark.parametrize(
    "script",
    [
        f"{STEPS}steps()",
        f"import numpy as np\n{INIT}{STEPS}steps()",
        f"{STEPS}for _ in range(20):\n    step()\n{INIT}steps()",
    ],
    ids=["without init", "after init", "before init"],
)
def test_top_and_metrics_show_collectives_of_jax(
    watched: MonitoredJob, script: str
) -> None:
    ops = {"psum,jax,0", "pmax,jax,0"}
    if "ringjax.init()" in script:
        ops.add("allreduce,named,0")
    with begun(watched, script, "--metrics", "0"):
        found = watched.wait_for(
            lambda m: (
                m.get("ringjax_collective_bytes_total", {}).keys() >= ops
                and sum(m["ringjax_rank_last_total"].values()) > 60
            )
        )
        size = found["ringjax_collective_bytes_total"]
        assert set(size) == ops and found["ringjax_ranks"] == {"": 2}
        calls = found["ringjax_collective_wait_seconds_count"]["psum,jax,0"]
        assert 0 <= calls * 200_000 - size["psum,jax,0"] < 3 * 200_000
        delay = found["ringjax_rank_delay_seconds_total"]
        assert delay["1"] > 2 * delay["0"]
        with contextlib.closing(watched.attach()) as job:
            seen = next(
                status for status in iter(lambda: job.read(LONG), None)
                if status.view.culprit == 1 and status.view.step > 0
            )  # fmt: skip
        assert [row.rank for row in seen.view.rows] == [0, 1]
        assert seen.view.step > 0.02 and seen.view.busbw > 0
        watched.end()


def test_process_0_reports_without_ringrun() -> None:
    lines = """
    f = program(lambda x: lax.psum(x, "p"))
    x = array(np.ones((size, 4), np.float32))
    until = time.monotonic() + 4
    while True:
        time.sleep(0.02 if rank == 1 else 0)  # process 1 is the straggler
        over = np.full((2, 1), time.monotonic() > until, np.float32)
        if on(lambda x: lax.pmax(x, "p"), over)[0, 0]:
            break
    """
    reports = {"RINGJAX_REPORT": "1"}
    (_, first), (_, second) = run(lines, 2, reports, reports)
    assert "ringjax report: " in first and "<- all wait for it" in first
    assert second == ""


def test_a_profile_shows_collectives_of_jax(
    watched: MonitoredJob,
) -> None:
    folder = watched.folder / "profile"
    (watched.folder / "end").touch()
    script = f"{STEPS}{CALLS}call_all()\nsteps()\n"
    with begun(watched, script, "--profile", str(folder)):
        assert watched.job.wait() == 0, watched.job.logs()
    found = parts.read(folder)
    assert [part.number for part in found] == [0, 1]
    for part in found:
        assert {call.lane for call in part.calls} == {"jax"}
        assert {call.op for call in part.calls} == set(BYTES)
    assert "psum JAX's processes 0, 1" in watched.job.launcher_output()
