"""A process dies exactly there, and training goes on without losing a bit.

One job, many deaths: each worker number is given a point of its own at which it dies,
and newcomers get the next numbers. The points are described in ringjax/failpoints.py;
the proof is chaos/deeds.py's.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from chaos.deeds import PROGRAM, Chaos, Verdict
from support.launch import StartJob

from ringjax.elastic import Checkpointer

pytestmark = pytest.mark.timeout(150)

# Worker 1 is the first. Some die by themselves, early or late on their way in, others
# when they see a loss or a newcomer; the order is such that there always is one.
EVERYWHERE = (
    "call.agreed#40 recovery.halted recovery.reported join.ready pause.said "
    "call.moving#40 recovery.linked#2 state.described recovery.installed#2 "
    "join.admitted pause.asked call.complete#40 recovery.completed#2 mesh.called "
    "epoch.install#3 mesh.shared pause.over call.closed#40 commit.saved#5 "
    "memory.map recovery.linked recovery.installed agreement.halfway state.chunk"
)


def deaths(points: str, first: int) -> dict[int, str]:
    """Worker `first` dies at the first of these points, and so on."""
    return dict(enumerate(points.split(), start=first))


def armed(points: Mapping[int, str]) -> dict[str, str]:
    """The variable that has worker w die at points[w]."""
    entries = []
    for worker, point in points.items():
        name, _, passage = point.partition("#")
        entries.append(f"{name}=kill@{worker}#{passage or 1}")
    return {"RINGJAX_FAILPOINTS": ";".join(entries)}


def died(chaos: Chaos) -> set[int]:
    """The workers that are known to have been killed."""
    text = chaos.job.launcher_output()
    lines = re.findall(r"^ringrun: .*\bworker (\d+)\b.* killed by signal 9", text, re.M)
    return {int(number) for number in lines}


def wait_for_deaths(
    chaos: Chaos, points: Mapping[int, str], limit: float = 100
) -> None:
    """Waits until all of these have died; an error says who has not."""
    deadline = time.monotonic() + limit
    while alive := points.keys() - died(chaos):
        if chaos.job.poll() is not None or time.monotonic() > deadline:
            chaos.job.end_with_stacks()
            late = {worker: points[worker] for worker in sorted(alive)}
            raise AssertionError(f"never died: {late}\n{chaos.logs()}")
        time.sleep(0.02)


def all_have_died(chaos: Chaos, points: Mapping[int, str]) -> Verdict:
    """Waits for these deaths, and for what follows; each happened where it should."""
    wait_for_deaths(chaos, points)
    chaos.wait_for_steps(20)
    verdict, text = chaos.end(), chaos.job.launcher_output()
    for name in {point.partition("#")[0] for point in points.values()}:
        times = sum(point.partition("#")[0] == name for point in points.values())
        assert text.count(f"failpoint {name}: kill") == times, f"{name}\n{text}"
    return verdict


def test_members_and_newcomers_die_anywhere(
    start_job: StartJob, tmp_path: Path
) -> None:
    points = deaths(EVERYWHERE, 1)
    chaos = Chaos(start_job, tmp_path, 4, env=armed(points), seats=100)
    all_have_died(chaos, points)


def test_a_member_dies_while_a_newcomer_is_being_connected(
    start_job: StartJob, tmp_path: Path
) -> None:
    # Each epoch connects two communicators. Worker 1 dies in the second epoch, so that
    # the first one that worker 2 gets to is the repair after it.
    points = {1: "mesh.called#3"}
    chaos = Chaos(
        *(start_job, tmp_path, 2),
        env=armed(points),
        options=["--max-np", "3", "-H", "localhost:9"],
    )
    all_have_died(chaos, points)
    assert "worker 2 joined as rank" in chaos.job.launcher_output()


def test_ranks_die_anywhere_in_a_compiled_call(
    start_job: StartJob, tmp_path: Path
) -> None:
    points = deaths("call.moving#200 call.complete#90", 1)
    chaos = Chaos(start_job, tmp_path, 3, env=armed(points), program=PROGRAM)
    assert all_have_died(chaos, points).largest == 3


def test_one_dies_that_has_all_others_go_back_to_the_last_commit(
    start_job: StartJob, tmp_path: Path
) -> None:
    points = {1: "restart.said"}
    errors = "commit.saved=error@2#10;commit.saved=error@1#30"
    env = {"RINGJAX_FAILPOINTS": f"{errors};restart.said=kill@1"}
    chaos = Chaos(start_job, tmp_path, 3, env=env)
    assert all_have_died(chaos, points).smallest >= 2


def test_rank_0_dies_while_it_writes_a_checkpoint(
    start_job: StartJob, tmp_path: Path
) -> None:
    traces, folder = tmp_path / "traces", tmp_path / "checkpoints"
    traces.mkdir()
    points = deaths("checkpoint.begun checkpoint.written checkpoint.named", 0)
    chaos = Chaos(
        *(start_job, traces, 4),
        env=armed(points),
        seats=100,
        arguments=[str(folder)],
    )
    all_have_died(chaos, points)
    numbers = Checkpointer(folder).numbers()
    assert 0 < len(numbers) <= 4  # an old checkpoint stays until the next is complete


@pytest.mark.parametrize("point", ["coordinator.formed", "coordinator.told"])
def test_the_coordinator_dies_when_it_forms_an_epoch(
    start_job: StartJob, tmp_path: Path, point: str
) -> None:
    env = {"RINGJAX_FAILPOINTS": f"{point}=kill#2"}  # the first one is the start
    chaos = Chaos(start_job, tmp_path, 2, env=env)
    training = chaos.wait_for(2)
    chaos.do("kill", 1, training[1], random.Random(1))
    chaos.wait_for_steps(20)
    chaos.wait_for(2)
    verdict, text = chaos.end(), chaos.job.launcher_output()
    assert verdict.largest == 2
    assert text.count(f"failpoint {point}: kill") == 1
    assert "the coordinator ended (killed by signal 9 (SIGKILL)" in text
