"""Profiles of real jobs: of a part of a program, of a whole job, and with failures."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doctor import needs_root
from support.elastic_job import ElasticJob
from support.launch import ROOT, StartJob
from support.rank_worker import World

import ringjax
from ringjax import eager, runtime
from ringjax.profile import archive, breakdown, parts


def shared(folder: Path) -> Path:
    """Returns the folder of rank 0, on all ranks."""
    return Path(runtime.current("test").exchange(str(folder), "a path")[0])


@jax.jit
def _reduce(x: jax.Array) -> jax.Array:
    return ringjax.allreduce(x, name="y")


def _step() -> None:
    eager.allreduce(np.ones(10, np.float32), name="x")
    jax.block_until_ready(_reduce(jnp.ones(1000)))


def _merged(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / archive.MERGED, "rt") as text:
        found: list[dict[str, Any]] = json.load(text)["traceEvents"]
    return found


@pytest.mark.launch("jax")
@pytest.mark.ranks(1, 2, 3)
def test_a_profile_contains_all_ranks_and_both_lanes(
    world: World, tmp_path: Path
) -> None:
    folder = shared(tmp_path) / "profile"
    _step()
    eager.barrier(name="before")
    with ringjax.profile(folder):
        for _ in range(5):
            _step()
    _step()
    if world.rank != 0:
        return
    found = parts.read(folder)
    assert [part.who for part in found] == [f"rank {r}" for r in range(world.size)]
    for part in found:
        assert part.end is not None
        assert part.lost == 0
        names = [(c.lane, c.name) for c in part.calls if c.name in "xy"]
        assert names == [("named", "x"), ("compiled", "y")] * 5
        assert all(
            c.agreed is not None and c.entered <= c.agreed <= c.done for c in part.calls
        )
    assert parts.describe_missing(found) == []
    events = _merged(folder)
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"step", "jit lane", "eager lane"} <= lanes
    for rank in range(world.size):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert [e["name"] for e in slices].count("allreduce y") == 5
    # The merged profile shifts the events of JAX to the clock of ringjax's events.
    own = sorted(
        e["ts"] for e in events if e["pid"] == 0 and e["name"] == "allreduce y"
    )
    of_jax = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events
        if e["pid"] // 1_000_000 == 1 and e["name"] == "ringjax.allreduce"
        and "hlo_op" in e["args"]
    )  # fmt: skip
    assert len(of_jax) == 5
    for time_us, (begin, end) in zip(own, of_jax, strict=True):
        assert begin - 100 < time_us < end + 100


@pytest.mark.launch("jax")
@pytest.mark.ranks(2, 3)
def test_a_profile_shows_buckets_beside_the_program(
    world: World, tmp_path: Path
) -> None:
    folder = shared(tmp_path) / "profile"
    tx = ringjax.allreduce_grads(overlap=True, bucket_bytes=4096)
    grads = {"a": jnp.ones(1500), "b": jnp.ones((50, 40))}

    @jax.jit
    def update(state: Any) -> Any:
        return tx.update(grads, state)

    _, state = update(tx.init(grads))
    jax.block_until_ready(state)
    with ringjax.profile(folder, jax_trace=False):
        for _ in range(6):
            if world.rank == 1:
                time.sleep(0.1)  # the other ranks wait, and have nothing to overlap
            _, state = update(state)
            jax.block_until_ready(state)
        time.sleep(0.3)
    if world.rank != 0:
        return
    found = parts.read(folder)
    for part in found:
        calls = [call for call in part.calls if call.name == "grads"]
        assert len(calls) >= 12
        assert all(call.overlapped for call in calls)
    first = breakdown.rank_breakdowns(breakdown.MergedProfile.of(found))[0]
    assert found[0].sent[-1][2] > 0.3  # the end of the last step, in seconds
    assert first.waits > first.moves


@pytest.mark.launch("jax")
@pytest.mark.ranks(1, 2, 3)
def test_a_profile_ends_after_its_number_of_steps(world: World, tmp_path: Path) -> None:
    folder = shared(tmp_path) / "profile"
    profile = ringjax.profile(folder, steps=3, jax_trace=False)
    deadline, all_done = time.monotonic() + 30, False
    while not all_done:
        _step()
        assert time.monotonic() < deadline
        done = np.array([parts.complete(folder, profile._recording.run)], np.float64)
        all_done = bool(eager.allreduce(done, name="done", op=ringjax.Min)[0])
    profile.stop()
    if world.rank == 0:
        for rank in breakdown.rank_breakdowns(
            breakdown.MergedProfile.of(parts.read(folder))
        ):
            assert rank.steps == 3
        assert (folder / archive.ARCHIVE).exists()


@pytest.mark.launch("jax")
@pytest.mark.ranks(2)
def test_the_program_may_mark_its_steps(world: World, tmp_path: Path) -> None:
    folder = shared(tmp_path) / "profile"
    with ringjax.profile(folder, jax_trace=False) as profile:
        for _ in range(4):
            for _ in range(3):
                _step()
            profile.step()
    if world.rank == 0:
        for rank in breakdown.rank_breakdowns(
            breakdown.MergedProfile.of(parts.read(folder))
        ):
            assert rank.steps == 3


@pytest.mark.launch("jax")
@pytest.mark.ranks(2)
def test_a_running_trace_of_the_program_continues(world: World, tmp_path: Path) -> None:
    folder = shared(tmp_path) / "profile"
    with jax.profiler.trace(str(tmp_path / "own")):
        with ringjax.profile(folder):
            _step()
        _step()
    assert list((tmp_path / "own").rglob("*.xplane.pb"))
    eager.barrier(name="all have ended")
    if world.rank == 0:
        missing = parts.describe_missing(parts.read(folder))
        assert len(missing) == 2
        assert all("without jax's own trace" in text for text in missing)


@pytest.mark.launch("jax")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["start_trace", "trace"])
def test_a_trace_of_the_program_replaces_that_of_the_profile(
    world: World, tmp_path: Path, kind: str
) -> None:
    folder = shared(tmp_path) / "profile"
    own = str(tmp_path / "own")
    start = jax.profiler.start_trace
    with ringjax.profile(folder):
        _step()
        if kind == "trace":
            with jax.profiler.trace(own):
                _step()
        else:
            jax.profiler.start_trace(own)
            _step()
            jax.profiler.stop_trace()
    assert jax.profiler.start_trace is start
    assert list((tmp_path / "own").rglob("*.xplane.pb"))
    eager.barrier(name="all have ended")
    if world.rank == 0:
        found = parts.read(folder)
        assert parts.describe_missing(found) == []
        assert all(part.jax is not None for part in found)


@pytest.mark.launch("jax")
@pytest.mark.ranks(2)
def test_bad_profile_arguments_are_refused_at_once(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Not a directory"):
        ringjax.profile(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="steps must be positive"):
        ringjax.profile(tmp_path, steps=0)


SCRIPT = """
import os, signal, sys, time
import numpy as np
import ringjax
from ringjax import eager
from support import numpy_only

ringjax.init()
for step in range(40):
    time.sleep(0.03 if ringjax.rank() == 1 else 0.01)
    eager.allreduce(np.ones(1000), name="gradients")
    if step == 20:
        time.sleep(0.5)
        exec(os.environ.get("RINGJAX_TEST_CODE", ""))
"""


def test_a_profile_of_a_whole_job(start_job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    job = start_job(3, SCRIPT, options=["--profile", str(folder)])
    assert job.wait(60) == 0, job.logs()
    text = job.launcher_output()
    assert "39 steps of" in text
    (line,) = re.findall(r"^rank 1 .*$", text, re.MULTILINE)
    assert line.endswith("<- slowest"), text
    assert "profile.tar: open it with https://ui.perfetto.dev" in text
    assert {p.name for p in folder.iterdir()} == {
        "parts", archive.ARCHIVE, archive.MERGED
    }  # fmt: skip
    show = [sys.executable, "-P", "-m", "ringjax.profile", "show", str(folder)]
    done = subprocess.run(show, capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in text


def test_a_killed_rank_leaves_its_part_of_the_profile(
    start_job: StartJob, tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    kill = "if ringjax.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)"
    job = start_job(
        3, SCRIPT, options=["--profile", str(folder)], env={"RINGJAX_TEST_CODE": kill}
    )
    assert job.wait(60) == 137, job.logs()
    text = job.launcher_output()
    assert "rank 1: its file has no end" in text, job.logs()
    assert re.match(r"ringrun: rank 1 .*SIGKILL", text.splitlines()[-1]), text
    assert "20 steps of" in text, text
    found = parts.read(folder)
    assert [len([c for c in p.calls if not c.code]) for p in found] == [21, 21, 21]
    assert (folder / archive.ARCHIVE).exists()


def test_a_full_disk_ends_the_profile_but_not_the_job(
    start_job: StartJob, tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
    job = start_job(2, limit + SCRIPT, options=["--profile", str(folder)])
    assert job.wait(60) == 0, job.logs()
    for rank in (0, 1):
        found = re.findall(
            r"the profile of rank (\d) ends here: (.*)", job.output(rank)
        )
        ((number, reason),) = found
        assert int(number) == rank
        assert "File too large" in reason
    text = job.launcher_output()
    assert "rank 0: its file has no end" in text
    assert (folder / archive.ARCHIVE).exists()


def test_an_unusable_folder_fails_ringrun_before_the_job(
    start_job: StartJob, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    job = start_job(2, SCRIPT, options=["--profile", str(tmp_path / "file")])
    assert job.wait(30) == 1
    assert re.search(r"^ringrun: .*File exists", job.launcher_output(), re.MULTILINE)


def test_a_folder_that_a_rank_cannot_use_is_a_warning(start_job: StartJob) -> None:
    head = "import os\nos.environ['RINGJAX_PROFILE'] = '/proc/none/here'\n"
    job = start_job(2, head + SCRIPT)
    assert job.wait(60) == 0, job.logs()
    for rank in (0, 1):
        text = f"warning: no profile of rank {rank}: "
        assert job.output(rank).count(text) == 1, job.logs()


CLOCKS = """
import os, sys, time
if os.environ["RINGJAX_RANK"] != "0" and len(sys.argv) == 2:
    ahead = 1000 * int(os.environ["RINGJAX_RANK"])
    words = ["unshare", "-T", "--monotonic", str(ahead), "--fork", "--kill-child"]
    os.execvp("unshare", [*words, sys.executable, *sys.argv, "there"])
import ringjax
from ringjax import eager
from support import numpy_only

ringjax.init()
with ringjax.profile(sys.argv[1]):
    for _ in range(150):
        eager.barrier(name="b")
        time.sleep(0.01)
"""


@needs_root("unshare")
def test_clocks_of_two_namespaces_agree_within_half_a_round_trip(
    start_job: StartJob, tmp_path: Path
) -> None:
    """The clock of rank n is ahead by exactly 1000 n seconds, by a time namespace."""
    if subprocess.run(["unshare", "-T", "true"], capture_output=True).returncode:
        pytest.skip("this kernel has no namespaces for time")
    folder, script = tmp_path / "profile", tmp_path / "clocks.py"
    script.write_text(CLOCKS)
    job = start_job(3, [sys.executable, str(script), str(folder)])
    assert job.wait(60) == 0, job.logs()
    found = parts.read(folder)
    assert len({part.clock for part in found}) == 3
    for part in found[1:]:
        assert len(part.readings) >= 3
        for reading in part.readings:
            error = reading.ahead + 1000 * part.number
            assert abs(error) <= reading.trip / 2, reading
    merged = breakdown.MergedProfile.of(found)
    assert merged.clock.error is not None
    trips = [reading.trip for part in found[1:] for reading in part.readings]
    assert merged.clock.error <= max(trips) / 2
    # No rank passes a barrier before the last rank has entered it.
    for exchange in merged.exchanges:
        last_entered = max(share.entered for share in exchange.ranks)
        for share in exchange.ranks:
            assert share.agreed is not None
            assert share.agreed >= last_entered - merged.clock.error
    assert "clocks agree within" in breakdown.format_breakdown(merged)


ELASTIC = """
i = 0
while not os.path.exists(sys.argv[0] + ".stop"):
    ringjax.eager.allreduce(np.ones(100), name="gradients")
    say("step", i, runtime.size())
    i += 1
    time.sleep(0.01)
"""


def test_a_profile_of_an_elastic_job_that_loses_a_worker(
    start: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    job: ElasticJob = start(3, ELASTIC, env={"RINGJAX_PROFILE": str(folder)})
    for worker in range(3):
        job.wait_for_line(worker, "step", 30)
    job.kill(0)
    before = len(job.lines(1, "step"))
    for worker in (1, 2):
        job.wait_for_line(worker, "step", before + 60)
    time.sleep(0.5)
    job.create_flag("stop")
    assert (job.wait(1), job.wait(2)) == (0, 0), job.logs()
    found = parts.read(folder)
    assert [part.who for part in found] == ["worker 0", "worker 1", "worker 2"]
    assert [len(part.members) for part in found] == [1, 2, 2]
    # After the loss, the remaining workers have moved up to lower ranks.
    assert [part.members[-1].rank for part in found] == [0, 0, 1]
    missing = parts.describe_missing(found)
    assert missing == ["worker 0: its file has no end: it died, or the disk is full"]
    merged = breakdown.MergedProfile.of(found)
    sizes: dict[int, set[int]] = {}
    for exchange in merged.exchanges:
        sizes.setdefault(exchange.call_id[0], set()).add(len(exchange.ranks))
    first, second = sizes.values()
    assert 3 in first
    assert second == {2}
    assert "worker 2" in breakdown.format_breakdown(merged)


@needs_root("unshare", "mount")
def test_parts_on_another_disk_are_fetched(start_job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "old").write_text("stays")
    mount = f'mount -t tmpfs tmpfs {folder} && exec "$@"'
    agent = f"unshare -m --propagation private sh -c '{mount}' {{host}}"
    options = ["-H", "localhost:1,far:2", "--agent-command", agent]
    job = start_job(3, SCRIPT, options=[*options, "--profile", str(folder)])
    assert job.wait(60) == 0, job.logs()
    found = parts.read(folder)
    assert [(part.who, part.host) for part in found] == [
        ("rank 0", "localhost"), ("rank 1", "far"), ("rank 2", "far")
    ]  # fmt: skip
    assert parts.describe_missing(found) == []
    assert "3 ranks on 2 hosts" in job.launcher_output()
    assert (folder / "old").read_text() == "stays"
