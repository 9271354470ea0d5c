"""Workers are killed at failpoints, and training continues with the same results.

One job tests many failpoints: each worker number has a failpoint at which the worker is
killed, and replacements have the next numbers. ringjax/failpoints.py describes the
points, and chaos/faults.py checks the training.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from chaos.faults import PROGRAM, ChaosJob, CheckResult
from support.launch import StartJob

from ringjax.elastic import Checkpointer

pytestmark = pytest.mark.timeout(150)

# Worker 1 has the first point. Some points are passed while a worker joins, others only
# while a member handles a loss or a newcomer. In this order, the kill at each point
# causes the loss or the newcomer that the next points need.
ALL_POINTS = (
    "call.agreed#40 recovery.halted recovery.reported join.ready pause.said "
    "call.moving#40 recovery.linked#2 state.described recovery.installed#2 "
    "join.admitted pause.asked call.complete#40 recovery.completed#2 links.called "
    "epoch.install#3 links.shared pause.over call.closed#40 commit.saved#5 "
    "memory.map recovery.linked recovery.installed agreement.halfway state.chunk"
)


def assign(points: str, first: int) -> dict[int, str]:
    """Assigns the points, in order, to the workers from number `first` on."""
    return dict(enumerate(points.split(), start=first))


def failpoint_env(points: Mapping[int, str]) -> dict[str, str]:
    """Returns the variable that kills worker w at `points[w]`, for all w."""
    entries = []
    for worker, point in points.items():
        name, _, passage = point.partition("#")
        entries.append(f"{name}=kill@{worker}#{passage or 1}")
    return {"RINGJAX_FAILPOINTS": ";".join(entries)}


def killed(chaos: ChaosJob) -> set[int]:
    """Returns the workers that ringrun has reported as killed."""
    text = chaos.job.launcher_output()
    lines = re.findall(r"^ringrun: .*\bworker (\d+)\b.* killed by signal 9", text, re.M)
    return {int(number) for number in lines}


def wait_for_kills(
    chaos: ChaosJob, points: Mapping[int, str], limit: float = 100
) -> None:
    """Waits until all workers of `points` were killed; the error lists the others."""
    deadline = time.monotonic() + limit
    while alive := points.keys() - killed(chaos):
        if chaos.job.poll() is not None or time.monotonic() > deadline:
            chaos.job.end_with_stacks()
            missing = {worker: points[worker] for worker in sorted(alive)}
            raise AssertionError(f"not killed: {missing}\n{chaos.logs()}")
        time.sleep(0.02)


def check_kills(chaos: ChaosJob, points: Mapping[int, str]) -> CheckResult:
    """Waits for all kills and 20 more steps, and checks where the kills happened."""
    wait_for_kills(chaos, points)
    chaos.wait_for_steps(20)
    result, text = chaos.end(), chaos.job.launcher_output()
    for name in {point.partition("#")[0] for point in points.values()}:
        times = sum(point.partition("#")[0] == name for point in points.values())
        assert text.count(f"failpoint {name}: kill") == times, f"{name}\n{text}"
    return result


def test_members_and_newcomers_are_killed_at_every_failpoint(
    start_job: StartJob, tmp_path: Path
) -> None:
    points = assign(ALL_POINTS, 1)
    chaos = ChaosJob(start_job, tmp_path, 4, env=failpoint_env(points), slots=100)
    check_kills(chaos, points)


def test_a_member_dies_while_a_newcomer_is_being_connected(
    start_job: StartJob, tmp_path: Path
) -> None:
    # Each epoch connects two communicators, so #3 is in the second epoch, which worker
    # 2 should join. Worker 2 joins in the epoch after that, the repair.
    points = {1: "links.called#3"}
    chaos = ChaosJob(
        *(start_job, tmp_path, 2),
        env=failpoint_env(points),
        options=["--max-np", "3", "-H", "localhost:9"],
    )
    check_kills(chaos, points)
    assert "worker 2 joined as rank" in chaos.job.launcher_output()


def test_ranks_are_killed_inside_a_compiled_call(
    start_job: StartJob, tmp_path: Path
) -> None:
    points = assign("call.moving#200 call.complete#90", 1)
    chaos = ChaosJob(start_job, tmp_path, 3, env=failpoint_env(points), program=PROGRAM)
    assert check_kills(chaos, points).largest == 3


def test_a_worker_is_killed_after_it_asks_for_a_restart(
    start_job: StartJob, tmp_path: Path
) -> None:
    points = {1: "restart.said"}
    errors = "commit.saved=error@2#10;commit.saved=error@1#30"
    env = {"RINGJAX_FAILPOINTS": f"{errors};restart.said=kill@1"}
    chaos = ChaosJob(start_job, tmp_path, 3, env=env)
    assert check_kills(chaos, points).smallest >= 2


def test_rank_0_dies_while_it_writes_a_checkpoint(
    start_job: StartJob, tmp_path: Path
) -> None:
    traces, folder = tmp_path / "traces", tmp_path / "checkpoints"
    traces.mkdir()
    points = assign("checkpoint.begun checkpoint.written checkpoint.named", 0)
    chaos = ChaosJob(
        *(start_job, traces, 4),
        env=failpoint_env(points),
        slots=100,
        arguments=[str(folder)],
    )
    check_kills(chaos, points)
    numbers = Checkpointer(folder).numbers()
    assert 0 < len(numbers) <= 4  # an old checkpoint stays until the next is complete


@pytest.mark.parametrize("point", ["coordinator.formed", "coordinator.told"])
def test_the_coordinator_dies_when_it_forms_an_epoch(
    start_job: StartJob, tmp_path: Path, point: str
) -> None:
    env = {"RINGJAX_FAILPOINTS": f"{point}=kill#2"}  # #1 is the start of the job
    chaos = ChaosJob(start_job, tmp_path, 2, env=env)
    training = chaos.wait_for_workers(2)
    chaos.inject("kill", 1, training[1], random.Random(1))
    chaos.wait_for_steps(20)
    chaos.wait_for_workers(2)
    result, text = chaos.end(), chaos.job.launcher_output()
    assert result.largest == 2
    assert text.count(f"failpoint {point}: kill") == 1
    assert "the coordinator ended (killed by signal 9 (SIGKILL)" in text
