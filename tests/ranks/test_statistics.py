"""Statistics of the calls of a rank: sums, recent calls, reports, and writers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.launch import StartJob
from support.rank_worker import World
from support.waiting import until

import ringjax
from ringjax import eager, runtime

LATE = 0.02  # seconds


def _named() -> None:
    eager.allreduce(np.ones(1000, np.float32), name="x")


@jax.jit
def _reduce(x: jax.Array) -> jax.Array:
    return ringjax.allreduce(x, name="y")


def _compiled() -> None:
    jax.block_until_ready(_reduce(jnp.ones(1000)))


def _allreduce_stats(lane: str) -> dict[str, Any]:
    found: dict[str, Any] = ringjax.stats()["process_sets"][0][lane]["allreduce"]
    return found


@pytest.mark.launch("jax")
@pytest.mark.ranks(2, 3)
def test_the_transports_of_the_links_are_counted(world: World) -> None:
    native = runtime.communicator().stats()["transports"]
    assert ringjax.stats()["transports"] == native
    assert native.keys() <= {"shm", "tcp"}


@pytest.mark.launch("jax")
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("lane", ["named", "compiled"])
def test_waiting_is_measured_apart_from_moving_data(world: World, lane: str) -> None:
    call: Callable[[], None] = {"named": _named, "compiled": _compiled}[lane]
    call()
    before = _allreduce_stats(lane)
    late: list[float] = []
    for _ in range(5):
        eager.barrier(name="together")
        if world.rank == 0:
            time.sleep(LATE)
        late.append(time.monotonic())
        call()
    after = _allreduce_stats(lane)
    late = eager.broadcast(np.array(late), root_rank=0).tolist()
    assert after["calls"] - before["calls"] == 5
    assert after["bytes"] - before["bytes"] == 5 * 4000
    assert after["failures"] == before["failures"]
    for kind in ("wait", "move"):
        assert sum(after[f"{kind}_histogram"]) == after["calls"]
    if lane == "compiled" and world.size > 1:
        assert after["algorithms"] and after["sent_bytes"] > 0
    name = {"named": "x", "compiled": "y"}[lane]
    calls = [c for c in ringjax.recent_calls() if c["name"] == name]
    if world.rank > 0:
        # This rank waits less than LATE if it was late itself.
        waits = [t - c["entered"] for t, c in zip(late, calls[-5:], strict=True)]
        waited = after["wait_seconds"] - before["wait_seconds"]
        assert waited > sum(max(w, 0) for w in waits) * 0.9
        assert after["most_waited"] > max(waits) * 0.9
    last = calls[-1]
    assert last["named"] == (lane == "named")
    assert (last["op"], last["bytes"], last["set"], last["ok"]) == (
        *("allreduce", 4000, 0),
        True,
    )
    assert last["entered"] <= last["agreed"] <= last["done"] <= time.monotonic()


@pytest.mark.launch("jax")
@pytest.mark.ranks(3)
@pytest.mark.parametrize("lane", ["named", "compiled"])
def test_long_data_that_only_move_take_tiles(world: World, lane: str) -> None:
    """An alltoall takes tiles if all ranks send equally many rows to each rank."""
    rows, rank = 30_000, world.rank
    api: Any = eager if lane == "named" else ringjax
    x = np.arange(3 * rows, dtype=np.float32) + rank
    got = np.asarray(api.broadcast(x, root_rank=1, name="b"))
    assert (got == x - rank + 1).all()
    got = np.asarray(api.allgather(x[: rows + rank], name="g"))
    parts = [x[: rows + r] - rank + r for r in range(3)]
    assert (got == np.concatenate(parts)).all()
    for name, more in (("even", 0), ("uneven", 1)):
        # Rank r sends `more` rows to rank 0 beyond those to the others.
        splits = [rows - 1 + more, rows - 1, rows - 1]
        sent = np.repeat(np.arange(3) + 10 * rank, splits)
        got = np.asarray(api.alltoall(sent, splits=splits, name=name)[0])
        want = np.repeat(rank + 10 * np.arange(3), splits[rank])
        assert (got == want).all()
    routes = {c["name"]: c["algorithm"] for c in ringjax.recent_calls()}
    assert routes["b"] == routes["g"] == routes["even"] == "tiles"
    assert routes["uneven"] == "pairwise"


@pytest.mark.launch("jax")
@pytest.mark.ranks(1, 3)
def test_buckets_have_separate_sums(world: World) -> None:
    for _ in range(3):
        for size in (10, 20):
            eager.allreduce(np.ones(size, np.float32), name=f"bucket {size}")
    found = {one["name"]: one for one in ringjax.stats(buckets=True)["buckets"]}
    for size in (10, 20):
        bucket = found[f"bucket {size}"]
        assert (bucket["calls"], bucket["bytes"], bucket["set"]) == (3, 4 * size, 0)
        assert bucket["named"] and bucket["op"] == "allreduce"
        assert bucket["wait_seconds"] >= 0 and bucket["move_seconds"] >= 0
    assert "buckets" not in ringjax.stats()


@pytest.mark.launch("jax")
@pytest.mark.ranks(2, 3)
def test_process_sets_have_separate_sums(world: World) -> None:
    pair = ringjax.add_process_set([0, 1])
    try:
        if world.rank < 2:
            eager.allgather(np.ones((2, 2)), name="pair", process_set=pair)
        sets = ringjax.stats()["process_sets"]
        number = pair.process_set_id
        assert (number in sets) == (world.rank < 2)
        if world.rank < 2:
            assert sets[number]["named"]["allgather"]["calls"] == 1
    finally:
        eager.barrier(name="before remove")
        ringjax.remove_process_set(pair)


# `steps` yields until the file $END exists.
STEPS = """
import gc, os, sys, time
import numpy as np
import ringjax
from ringjax import eager
from support import numpy_only

ringjax.init()

def steps():
    while True:
        yield
        eager.allreduce(np.ones(100), name="gradients")
        end = np.array([os.path.exists(os.environ["END"])], np.float64)
        if eager.allreduce(end, ringjax.Max, name="end")[0]:
            break
"""
LATE_LOAD = """
def load():
    time.sleep(0.03)

for _ in steps():
    time.sleep(0.01)
    if ringjax.rank() == 1:
        load()
"""


# Without the monitor of ringrun, rank 0 prints the reports.
NO_MONITOR = "import os\ndel os.environ['RINGJAX_MONITOR']\n"


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_report_names_the_straggler(
    start_job: StartJob, tmp_path: Path, by_rank: bool
) -> None:
    end, script = tmp_path / "end", STEPS + LATE_LOAD
    if by_rank:
        head = f"{NO_MONITOR}os.environ['RINGJAX_REPORT'] = '2'\n"
        job = start_job(3, head + script, {"END": str(end)})
    else:
        job = start_job(3, script, {"END": str(end)}, ["--report", "2"])

    def blocks() -> list[str]:
        text = job.output(0) if by_rank else job.launcher_output()
        return text.split("ringjax report: ")[1:]

    until(lambda: len(blocks()) > 2 or job.poll() is not None, 40)
    end.touch()
    assert job.wait() == 0, job.logs()
    for block in blocks()[:2]:  # these blocks cover whole windows
        (named,) = re.findall(r"^ +(\d)  .*<- all wait for it$", block, re.MULTILINE)
        assert named == "1", block
        (location,) = re.findall(r"^ +1  .* ms  (\S+ in \w+)", block, re.MULTILINE)
        assert location.endswith("in load"), block
    assert "the slowest was rank 1" in "".join(blocks())
    for rank in range(by_rank, 3):
        assert "ringjax report" not in job.output(rank)


# The causes for which a rank is late: the code, and the location in the report.
LATE_CODE = {
    "input": "next(batches)",
    "garbage": "gc.collect()",
    "work": "work(0.008)",
}
LOCATIONS = {"input": "in load", "garbage": "garbage collection", "work": "in work"}
# Makes objects before `init`, because a report includes the first work after `init`.
GARBAGE = """
import gc
gc.disable()
objects = [[n] for n in range(200_000)]
"""
LATE_STEPS = """
def all_compute():
    time.sleep(0.02)

def work(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

def load():
    while True:
        time.sleep(0.004)
        yield

batches = load()
for _ in steps():
    all_compute()
    if ringjax.rank() == 1:
        {late}
"""


@pytest.mark.parametrize("cause", LATE_CODE)
def test_a_report_says_where_a_rank_is_late(
    start_job: StartJob, tmp_path: Path, cause: str
) -> None:
    end = tmp_path / "end"
    script = GARBAGE + STEPS + LATE_STEPS.format(late=LATE_CODE[cause])
    job = start_job(2, script, {"END": str(end)}, ["--report", "2"])

    def locations() -> list[str]:
        # If other programs delayed both ranks equally, a block has no such line.
        text = job.launcher_output().partition("ringjax report: ")[2]
        return re.findall(r"^.* 1  .* ms  (.+)$", text, re.MULTILINE)

    def found() -> bool:
        # A report shows where rank 1 is more often than the other rank, not where it is
        # most of the time. With 20 stack samples a second, a block may be wrong.
        return any(LOCATIONS[cause] in location for location in locations()[1:])

    until(lambda: found() or job.poll() is not None, 40)
    end.touch()
    assert job.wait() == 0, job.logs()
    assert found(), job.logs()


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_without_report_nothing_is_printed(
    start_job: StartJob, options: list[str]
) -> None:
    env = {"RINGJAX_REPORT": "1"} if options else {}
    job = start_job(2, "import ringjax\nringjax.init()\n", env, options)
    assert job.wait(60) == 0, job.logs()
    assert "ringjax" not in job.logs().partition("--- rank")[2], job.logs()
    assert "ringjax" not in job.launcher_output()


FAILS = """
import os, signal
import numpy as np
import ringjax
from ringjax import eager
from support import numpy_only

ringjax.init()
for step in range(3):
    eager.allreduce(np.ones(4), name=f"step {step}")
if ringjax.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
eager.allreduce(np.ones(4), name="lost")
"""


@pytest.mark.parametrize("subfolder", ["", "missing"])
def test_the_last_calls_are_in_a_file_when_a_job_fails(
    start_job: StartJob, tmp_path: Path, subfolder: str
) -> None:
    folder = tmp_path / subfolder
    job = start_job(3, FAILS, env={"RINGJAX_RECORD_DIR": str(folder)})
    assert job.wait(60) != 0
    text = job.output(0)
    if subfolder:
        assert f"could not be written to {folder}" in text, job.logs()
        assert "PeerLost" in text
        return
    (path,) = re.findall(r"\[ringjax rank 0\] its last calls are in (\S+)", text)
    head, *calls = map(json.loads, Path(path).read_text().splitlines())
    assert head["who"] == "rank 0" and "rank 1" in head["reason"]
    assert [c["name"] for c in calls] == [*(f"step {i}" for i in range(3)), "lost"]
    assert all(c["lane"] == "named" and c["op"] == "allreduce" for c in calls)
    assert [c["agreed"] is None for c in calls] == [False, False, False, True]


LOSSES = """
import os, signal, time
import numpy as np
import ringjax
from ringjax import eager, elastic, runtime
from support import numpy_only

ringjax.init()
worker = int(os.environ["RINGJAX_WORKER"])
state = elastic.State(step=0)

@elastic.run
def train(state):
    epoch, first = runtime.epoch_info().epoch, state.step
    while ringjax.size() < 3 or state.step < first + 90 or epoch < 4:
        time.sleep(0.01)
        if ringjax.rank() == 1:
            time.sleep(0.02)
        eager.allreduce(np.ones(100), name="gradients")
        if (state.step - first, epoch, worker) in ((60, 0, 2), (90, 2, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        if state.step % 10 == 0:
            state.commit()

train(state)
"""


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_report_follows_losses_and_joins(start_job: StartJob, by_rank: bool) -> None:
    """Kills two workers, one of them rank 0, and both are replaced."""
    head = f"{NO_MONITOR}os.environ['RINGJAX_REPORT'] = '1'\n" if by_rank else ""
    options = ["--min-np", "2", *(() if by_rank else ("--report", "1"))]
    job = start_job(3, head + LOSSES, options=options)
    assert job.wait(60) == 0, job.logs()
    logs = [job.output(worker) for worker in range(5)]
    text = "".join(logs) if by_rank else job.launcher_output()
    blocks = r"ringjax report: .*, epoch (\d+)\n((?: +.*\n|rank .*\n)*)"
    epochs = re.findall(blocks, text)
    assert {int(epoch) for epoch, _ in epochs} >= {2, 4}, text
    for epoch, block in epochs:
        if int(epoch) not in (2, 4):
            continue
        ranks = re.findall(r"(?m)^ +(\d)  ", block)
        # A rank that has just started may have sent no sample yet.
        assert ranks and ranks == sorted({"0", "1", "2"}.intersection(ranks)), block
        assert re.findall(r"(?m)^ +(\d)  .*<- all", block) in (["1"], []), block
    # The job makes about 35 calls a second. Calls that a process made under an earlier
    # rank must not be counted again.
    rates = [float(r) for r in re.findall(r"report: ([\d.e+]+) calls/s", text)]
    assert rates and max(rates) < 100, text
    assert re.search(r"(?m)^ +1  .*<- all wait for it$", text), text
    assert "the slowest was rank 1" in text
    if by_rank:  # rank 0 is first worker 0, then worker 1
        assert "ringjax report" in logs[0] and "ringjax report" in logs[1]
    else:
        assert not any("ringjax report" in log for log in logs)


@pytest.mark.launch("jax")
@pytest.mark.ranks(2)
def test_a_collector_for_prometheus_client(world: World) -> None:
    registry = CollectorRegistry()
    registry.register(ringjax.PrometheusCollector())
    _named()
    text = generate_latest(registry).decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["ringjax_ranks"].samples[0].value == 2
    (calls,) = families["ringjax_rank_calls"].samples
    assert calls.labels == {"rank": str(world.rank)}
    assert calls.value == ringjax.stats()["calls"] > 0
    labels = {"op": "allreduce", "lane": "named", "process_set": "0"}
    waits = families["ringjax_collective_wait_seconds"]
    counts = {s.value for s in waits.samples if s.name.endswith("_count")}
    (size,) = [
        s.value
        for s in families["ringjax_collective_bytes"].samples
        if s.labels == labels
    ]
    assert (
        size == _allreduce_stats("named")["bytes"]
        and _allreduce_stats("named")["calls"] in counts
    )


@pytest.mark.launch("jax")
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["add_scalar", "scalar", "write_scalars", "function"])
def test_scalars_are_written_to_any_writer(world: World, kind: str) -> None:
    """Writers of PyTorch, flax and clu work, and functions like `tf.summary.scalar`."""
    seen: dict[str, tuple[float, int]] = {}

    def write_one(tag: str, value: float, step: int) -> None:
        seen[tag] = value, step

    def write_several(step: int, scalars: dict[str, float]) -> None:
        seen.update({tag: (value, step) for tag, value in scalars.items()})

    write = write_several if kind == "write_scalars" else write_one
    writer = write if kind == "function" else SimpleNamespace(**{kind: write})
    # `seconds` is longer than the interval that the rates below are computed over.
    begin = time.monotonic()
    ringjax.write_scalars(writer, 0)
    seen.clear()
    for _ in range(20):
        _named()
    scalars = ringjax.write_scalars(writer, 7)
    seconds = time.monotonic() - begin
    assert seen == {f"ringjax/{name}": (v, 7) for name, v in scalars.items()}
    assert scalars["calls"] * seconds > 19 and scalars["bytes"] * seconds > 19 * 4000
    assert 0 <= scalars["wait"] <= 1 and 0 <= scalars["move"] <= 1
    assert (scalars["busbw"] > 0) == (world.size > 1)


@pytest.mark.launch("jax")
@pytest.mark.ranks(1)
def test_an_object_that_cannot_write_scalars_is_an_error(world: World) -> None:
    del world
    with pytest.raises(TypeError, match="int has no add_scalar, scalar or"):
        ringjax.write_scalars(3, 0)
