"""Chaos: workers die, freeze, leave, and training goes on without losing a step.

After every story, all steps are computed again in one process, see chaos/deeds.py. What
`make soak` does for hours. A new worker may come before the next step, so it depends on
the machine whether there is one with a rank less; that there is none with two less is
that nobody else was lost. One story has compiled steps and a state of jax's arrays;
the others are about the launcher, the coordinator and the core, and do without.
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
from chaos.deeds import PROGRAM, Chaos, lines
from support import leaks
from support.handshakes import needs_tls
from support.launch import StartJob

from ringjax.elastic import Checkpointer

SEED = 20  # decides the times of the deeds; their effects depend on the machine


@pytest.mark.timeout(150)
def test_a_killed_worker_costs_no_step(start_job: StartJob, tmp_path: Path) -> None:
    # The death must be noticed by the closed connection. The failure timeout, which
    # notices silence, is longer than the test may take.
    env = {"RINGJAX_FAILURE_TIMEOUT": "600"}
    chaos = Chaos(start_job, tmp_path, np=3, env=env, program=PROGRAM)
    training, chance = chaos.wait_for(3), random.Random(SEED)
    chaos.do("kill", max(training), training[max(training)], chance)
    chaos.wait_for_steps(50)
    chaos.wait_for(3)  # another worker takes its place
    verdict = chaos.end()
    assert len(verdict.recoveries) == 2
    assert verdict.smallest >= 2 and verdict.largest == 3


@pytest.mark.timeout(150)
def test_all_but_one_die_and_rank_0_is_the_first(
    start_job: StartJob, tmp_path: Path
) -> None:
    begin = time.monotonic()
    chaos = Chaos(start_job, tmp_path, np=3, seats=100)
    training, chance = chaos.wait_for(3), random.Random(SEED)
    start = time.monotonic() - begin
    chaos.do("kill", min(training), training[min(training)], chance)
    chaos.wait_for_steps(3)
    last = max(training)
    # Workers that have joined meanwhile count, too.
    while lines(tmp_path / f"{last}.jsonl")[-1]["size"] > 1:
        for worker, pid in chaos.training().items():
            if worker != last:
                chaos.do("kill", worker, pid, chance)
        chaos.wait_for_steps(3)
    chaos.wait_for(3)
    verdict = chaos.end()
    assert verdict.smallest == 1
    # 0.1 s on an idle machine, on which a job needs less than a second to start.
    assert max(verdict.recoveries) < 2 + 2 * start


@pytest.mark.timeout(150)
def test_one_of_many_dies(start_job: StartJob, tmp_path: Path) -> None:
    # Two cores are slow to connect 276 pairs, which is no reason to lose a rank.
    env = {"RINGJAX_FAILURE_TIMEOUT": "30", "RINGJAX_HEARTBEAT": "1"}
    chaos = Chaos(start_job, tmp_path, np=24, env=env)
    training, chance = chaos.wait_for(24), random.Random(SEED)
    chaos.do("kill", min(training), training[min(training)], chance)
    chaos.wait_for_steps(20)
    verdict = chaos.end()
    assert len(verdict.recoveries) == 23
    assert verdict.smallest >= 23


@pytest.mark.timeout(150)
def test_short_freezes_slow_peers_and_strangers_are_no_loss(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=2), random.Random(SEED)
    training = chaos.wait_for(2)
    for what in ("freeze", "slow", "garbage"):
        chaos.do(what, max(training), training[max(training)], chance)
        chaos.wait_for_steps(20)
    while "refused a connection" not in chaos.job.launcher_output():
        chaos.do("garbage", max(training), training[max(training)], chance)
    assert chaos.end().smallest == 2


@pytest.mark.timeout(150)
def test_a_long_freeze_is_a_loss_and_the_frozen_one_must_not_go_on(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    frozen = max(training)
    chaos.do("fence", frozen, training[frozen], chance)
    chaos.wait_for_steps(50)
    chaos.wait_for_end_of(frozen, 20)
    assert chaos.end().smallest >= 2  # and it contributed to nothing afterwards
    lost = rf"\(worker {frozen}, pid \d+\) was declared lost"
    assert re.search(lost, chaos.job.launcher_output()), chaos.logs()


@pytest.mark.timeout(150)
def test_a_worker_that_is_asked_to_leave_costs_nothing(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    chaos.do("term", max(training), training[max(training)], chance)
    chaos.wait_for_end_of(max(training), 30)
    chaos.wait_for_steps(50)
    assert chaos.end().smallest >= 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("tls", ["auto", pytest.param("required", marks=needs_tls)])
def test_a_worker_without_memory_is_lost_and_replaced(
    start_job: StartJob, tmp_path: Path, tls: str
) -> None:
    # And there is no shared memory for anybody, so that all of it goes over TCP.
    env = {"RINGJAX_FAILPOINTS": "memory.make=enospc", "RINGJAX_TLS": tls}
    chaos = Chaos(start_job, tmp_path, np=3, env=env)
    training, chance = chaos.wait_for(3), random.Random(SEED)
    chaos.do("memory", 1, training[1], chance)
    deadline = time.monotonic() + 40
    while "MemoryError" not in chaos.job.launcher_output():
        assert time.monotonic() < deadline, chaos.logs()
        time.sleep(0.05)
    chaos.wait_for(3)
    assert chaos.end().smallest >= 2
    text = chaos.job.launcher_output()
    assert "No space left on device" in text
    assert re.search(r"^ringrun: .*worker 1, .*MemoryError", text, re.MULTILINE)


def _group_of(root: str, limit: str) -> Path | None:
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
    """The processes of a control group, which may have 32 MiB more together."""
    folder = _group_of("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
    folder = folder or _group_of("/sys/fs/cgroup", "memory.max")
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
    chaos = Chaos(start_job, tmp_path, np=3)
    training, chance = chaos.wait_for(3), random.Random(SEED)
    small_group.write_text(str(training[1]))
    chaos.do("memory", 1, training[1], chance)
    chaos.wait_for_end_of(1, 40)
    chaos.wait_for(3)
    assert chaos.end().smallest >= 2
    text = chaos.job.launcher_output()
    assert re.search(r"^ringrun: .*worker 1, .* killed by signal 9", text, re.MULTILINE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


@pytest.mark.timeout(150)
def test_a_full_disk_costs_checkpoints_and_nothing_else(
    start_job: StartJob, tmp_path: Path, small_disk: Path
) -> None:
    traces, filling = tmp_path / "traces", small_disk / "filling"
    traces.mkdir()
    filling.write_bytes(bytes(980 << 10))
    chaos = Chaos(start_job, traces, 2, arguments=[str(small_disk)])
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
def test_sixty_deeds_of_every_kind_at_random(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos = Chaos(start_job, tmp_path, np=3, seats=100)
    chaos.wait_for(3)
    chaos.rage(random.Random(SEED), seconds=15, every=0.25)
    chaos.wait_for(3)
    chaos.wait_for_steps(20)
    verdict = chaos.end()
    assert chaos.counts()["kill"] >= 2
    assert chaos.failures() >= 2
    assert verdict.steps > 20
    assert verdict.largest == 3
