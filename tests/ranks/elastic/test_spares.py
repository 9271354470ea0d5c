"""Spares: processes that are ready, and sleep until a rank is lost.

Each test of a training ends with `ChaosJob.end`, which computes all steps again in one
process. tests/unit/test_ringrun_spares.py tests the launcher alone.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from chaos.faults import PROGRAM, ChaosJob
from support.elastic_member import ringrun_lines, wait_for
from support.launch import StartJob

OPTIONS = ("--spares", "1")


def start(start_job: StartJob, folder: Path, np: int = 3, **more: object) -> ChaosJob:
    """Starts a job with a spare, and waits until the spare is ready."""
    options = ["--max-np", str(np), *OPTIONS]
    chaos = ChaosJob(start_job, folder, np, options=options, **more)  # type: ignore[arg-type]
    chaos.wait_for_workers(np)
    wait_for(chaos.job, f"a spare (worker {np}")
    return chaos


def kill(chaos: ChaosJob, *workers: int) -> None:
    pids, rng = chaos.training(), random.Random(1)
    for worker in workers:
        chaos.inject("kill", worker, pids[worker], rng)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_spare_takes_the_place_of_a_lost_rank(
    start_job: StartJob, tmp_path: Path, victim: int
) -> None:
    chaos = start(start_job, tmp_path)
    kill(chaos, victim)
    wait_for(chaos.job, "spare worker 3 joined as rank 2; 3 ranks")
    wait_for(chaos.job, "a spare (worker 4")
    result = chaos.end()
    assert result.smallest >= 2 and result.largest == 3
    lines = ringrun_lines(chaos.job)
    # No line is about its end.
    assert lines[-2] == "a spare (worker 4) is ready" and "goodput" in lines[-1]


def test_a_spare_that_has_compiled_the_step(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos = start(start_job, tmp_path, 2, program=PROGRAM)
    kill(chaos, 0)
    wait_for(chaos.job, "spare worker 2 joined as rank 1; 2 ranks")
    chaos.wait_for_steps(20)
    assert chaos.end().largest == 2


def test_two_ranks_die_at_once(start_job: StartJob, tmp_path: Path) -> None:
    chaos = start(start_job, tmp_path)
    kill(chaos, 0, 1)
    wait_for(chaos.job, "spare worker 3 joined as rank 1")
    chaos.wait_for_workers(3)
    wait_for(chaos.job, ") is ready", 2)
    assert chaos.end().largest == 3


def test_a_sleeping_spare_dies(start_job: StartJob, tmp_path: Path) -> None:
    chaos = start(start_job, tmp_path)
    chaos.wait_for_steps(1)
    os.kill(chaos.pids()[3], signal.SIGKILL)
    wait_for(chaos.job, "a spare (worker 4")
    assert chaos.end().smallest == 3
    assert "go on" not in chaos.job.launcher_output()


@pytest.mark.parametrize("point", ["join.admitted", "recovery.linked"])
def test_a_spare_dies_while_it_joins(
    start_job: StartJob, tmp_path: Path, point: str
) -> None:
    env = {"RINGJAX_FAILPOINTS": f"{point}=kill@3"}
    chaos = start(start_job, tmp_path, env=env)
    kill(chaos, 1)
    wait_for(chaos.job, f"failpoint {point}: kill")
    chaos.wait_for_workers(3)
    chaos.wait_for_steps(20)
    assert chaos.end().largest == 3


def test_ctrl_c_ends_a_sleeping_spare(start_job: StartJob, tmp_path: Path) -> None:
    chaos = start(start_job, tmp_path)
    chaos.job.interrupt()
    assert chaos.job.wait() == 130  # the fixture checks that no process is left


def test_a_sleeping_spare_uses_no_processor(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos = start(start_job, tmp_path, program=PROGRAM)
    pid = chaos.pids()[3]
    before = _wakeups(pid)
    time.sleep(2)
    assert _wakeups(pid) - before < 10
    assert chaos.end().smallest == 3


def _wakeups(pid: int) -> int:
    """Returns how often the threads of a process have waited and continued."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        text = path.read_text().partition("\nvoluntary_ctxt_switches:")[2]
        total += int(text.split()[0])
    return total


WARM_UP = """
import ringjax

ringjax.init()

def warm_up(state):
    raise ValueError("boom")

@ringjax.elastic.run(warm_up=warm_up)
def train(state):
    while not os.path.exists(os.environ["FOLDER"] + "/end"):
        state.step += 1
        state.commit()

train(ringjax.elastic.State(step=0))
"""


def test_a_warm_up_that_raises(start_job: StartJob, tmp_path: Path) -> None:
    options = ["--min-np", "1", *OPTIONS]
    job = start_job(2, "import os\n" + WARM_UP, {"FOLDER": str(tmp_path)}, options)
    wait_for(job, "no more spares are started: 3 in a row have failed")
    (tmp_path / "end").touch()
    assert job.wait() == 0
    failed = [line for line in ringrun_lines(job) if "ValueError: boom" in line]
    assert [line.partition(")")[0] for line in failed] == [
        f"a spare (worker {worker}" for worker in (2, 3, 4)
    ]
