"""Chaos: workers are killed, frozen or leave, and training loses no step.

Each test ends with `ChaosJob.end`, which computes all steps again in one process (see
chaos/faults.py). `make soak` runs such faults for hours. A replacement may join before
the next step, so no test expects a step with one rank less; a step with two ranks less
would mean that another rank was lost, too. One test compiles its steps with JAX. The
others test the launcher, the coordinator and the core, and do not need JAX.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.faults import PROGRAM, ChaosJob, lines
from support import leaks
from support.handshakes import needs_tls
from support.launch import StartJob

from ringjax.elastic import Checkpointer

SEED = 20  # decides the times of faults; the effects of a fault depend on the machine


@pytest.mark.timeout(150)
def test_a_killed_worker_costs_no_step(start_job: StartJob, tmp_path: Path) -> None:
    # The others must detect the kill by the closed connection: the failure timeout,
    # which detects silence, is longer than the test may take.
    env = {"RINGJAX_FAILURE_TIMEOUT": "600"}
    chaos = ChaosJob(start_job, tmp_path, np=3, env=env, program=PROGRAM)
    training, rng = chaos.wait_for_workers(3), random.Random(SEED)
    chaos.inject("kill", max(training), training[max(training)], rng)
    chaos.wait_for_steps(50)
    chaos.wait_for_workers(3)  # a replacement has joined
    result = chaos.end()
    assert len(result.recoveries) == 2
    assert result.smallest >= 2 and result.largest == 3


@pytest.mark.timeout(150)
def test_all_ranks_but_one_are_killed_beginning_with_rank_0(
    start_job: StartJob, tmp_path: Path
) -> None:
    begin = time.monotonic()
    chaos = ChaosJob(start_job, tmp_path, np=3, slots=100)
    training, rng = chaos.wait_for_workers(3), random.Random(SEED)
    start = time.monotonic() - begin
    chaos.inject("kill", min(training), training[min(training)], rng)
    chaos.wait_for_steps(3)
    last = max(training)
    # Also kill the replacements that join meanwhile.
    while lines(tmp_path / f"{last}.jsonl")[-1]["size"] > 1:
        for worker, pid in chaos.training().items():
            if worker != last:
                chaos.inject("kill", worker, pid, rng)
        chaos.wait_for_steps(3)
    chaos.wait_for_workers(3)
    result = chaos.end()
    assert result.smallest == 1
    # On an idle machine a recovery takes 0.1 s, and the start less than a second.
    assert max(result.recoveries) < 2 + 2 * start


@pytest.mark.timeout(150)
def test_one_of_24_ranks_is_killed(start_job: StartJob, tmp_path: Path) -> None:
    # Two cores connect 276 pairs slowly, and no rank may be declared lost meanwhile.
    env = {"RINGJAX_FAILURE_TIMEOUT": "30", "RINGJAX_HEARTBEAT": "1"}
    chaos = ChaosJob(start_job, tmp_path, np=24, env=env)
    training, rng = chaos.wait_for_workers(24), random.Random(SEED)
    chaos.inject("kill", min(training), training[min(training)], rng)
    chaos.wait_for_steps(20)
    result = chaos.end()
    assert len(result.recoveries) == 23
    assert result.smallest >= 23


@pytest.mark.timeout(150)
def test_short_freezes_slow_peers_and_strangers_lose_no_rank(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, rng = ChaosJob(start_job, tmp_path, np=2), random.Random(SEED)
    training = chaos.wait_for_workers(2)
    for what in ("freeze", "slow", "garbage"):
        chaos.inject(what, max(training), training[max(training)], rng)
        chaos.wait_for_steps(20)
    while "refused a connection" not in chaos.job.launcher_output():
        chaos.inject("garbage", max(training), training[max(training)], rng)
    assert chaos.end().smallest == 2


@pytest.mark.timeout(150)
def test_a_worker_frozen_beyond_the_timeout_is_lost_and_ends(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, rng = ChaosJob(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for_workers(3)
    frozen = max(training)
    chaos.inject("fence", frozen, training[frozen], rng)
    chaos.wait_for_steps(50)
    chaos.wait_for_exit(frozen, 20)
    assert chaos.end().smallest >= 2  # end() checks that `frozen` added nothing later
    lost = rf"\(worker {frozen}, pid \d+\) was declared lost"
    assert re.search(lost, chaos.job.launcher_output()), chaos.logs()


@pytest.mark.timeout(150)
def test_a_worker_that_leaves_at_sigterm_loses_no_step(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, rng = ChaosJob(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for_workers(3)
    chaos.inject("term", max(training), training[max(training)], rng)
    chaos.wait_for_exit(max(training), 30)
    chaos.wait_for_steps(50)
    assert chaos.end().smallest >= 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("tls", ["auto", pytest.param("required", marks=needs_tls)])
def test_a_worker_without_memory_is_lost_and_replaced(
    start_job: StartJob, tmp_path: Path, tls: str
) -> None:
    # The failpoint denies shared memory to all workers, so all links use TCP.
    env = {"RINGJAX_FAILPOINTS": "memory.make=enospc", "RINGJAX_TLS": tls}
    chaos = ChaosJob(start_job, tmp_path, np=3, env=env)
    training, rng = chaos.wait_for_workers(3), random.Random(SEED)
    chaos.inject("memory", 1, training[1], rng)
    deadline = time.monotonic() + 40
    while "MemoryError" not in chaos.job.launcher_output():
        assert time.monotonic() < deadline, chaos.logs()
        time.sleep(0.05)
    chaos.wait_for_workers(3)
    assert chaos.end().smallest >= 2
    text = chaos.job.launcher_output()
    assert "No space left on device" in text
    assert re.search(r"^ringrun: .*worker 1, .*MemoryError", text, re.MULTILINE)


def _make_cgroup(root: str, limit: str) -> Path | None:
    folder = Path(root, f"ringjax-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / limit).write_text(str(32 << 20))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return folder


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Yields the cgroup.procs file of a control group with a limit of 32 MiB."""
    folder = _make_cgroup("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
    folder = folder or _make_cgroup("/sys/fs/cgroup", "memory.max")
    if folder is None:
        pytest.skip("needs a control group")
    processes = folder / "cgroup.procs"
    yield processes
    leaks.settle(lambda: processes.read_text().split())
    folder.rmdir()


@pytest.mark.timeout(150)
def test_a_worker_that_the_kernel_kills_for_its_memory_is_replaced(
    start_job: StartJob, tmp_path: Path, small_group: Path
) -> None:
    chaos = ChaosJob(start_job, tmp_path, np=3)
    training, rng = chaos.wait_for_workers(3), random.Random(SEED)
    small_group.write_text(str(training[1]))
    chaos.inject("memory", 1, training[1], rng)
    chaos.wait_for_exit(1, 40)
    chaos.wait_for_workers(3)
    assert chaos.end().smallest >= 2
    text = chaos.job.launcher_output()
    assert re.search(r"^ringrun: .*worker 1, .* killed by signal 9", text, re.MULTILINE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields the folder of a mounted file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


@pytest.mark.timeout(150)
def test_a_full_disk_loses_checkpoints_but_no_step(
    start_job: StartJob, tmp_path: Path, small_disk: Path
) -> None:
    traces, filling = tmp_path / "traces", small_disk / "filling"
    traces.mkdir()
    filling.write_bytes(bytes(980 << 10))
    chaos = ChaosJob(start_job, traces, 2, arguments=[str(small_disk)])
    chaos.wait_for_steps(50)
    deadline = time.monotonic() + 40
    while "could not be written" not in chaos.job.launcher_output():
        assert time.monotonic() < deadline, chaos.logs()
        time.sleep(0.05)
    assert Checkpointer(small_disk).numbers() == []
    filling.unlink()
    while not Checkpointer(small_disk).numbers():
        assert time.monotonic() < deadline, chaos.logs()
        time.sleep(0.05)
    assert chaos.end().smallest == 2
    assert "No space left on device" in chaos.job.launcher_output()


@pytest.mark.timeout(240)
def test_random_faults_of_every_kind(start_job: StartJob, tmp_path: Path) -> None:
    chaos = ChaosJob(start_job, tmp_path, np=3, slots=100)
    chaos.wait_for_workers(3)
    chaos.inject_faults(random.Random(SEED), seconds=15, every=0.25)
    chaos.wait_for_workers(3)
    chaos.wait_for_steps(20)
    result = chaos.end()
    assert chaos.counts()["kill"] >= 2
    assert chaos.failures() >= 2
    assert result.steps > 20
    assert result.largest == 3
