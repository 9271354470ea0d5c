"""Elastic jobs of groups under ringrun: they are lost and replaced whole.

Each group gives 2 ** its number; so the mean that a step returns tells whose it is of.
All shards of a step must have one membership, whichever of their calls broke off. A
process with several devices is a group of one.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest
from support import leaks, local_devices
from support.launch import Job, StartJob

pytestmark = pytest.mark.timeout(150)

STEPS = """
import os, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import ringjax

ringjax.init()
GROUP = int(os.environ["RINGJAX_WORKER"]) // ringjax.group_size()
END = sys.argv[0] + ".end"
say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())
mesh = jax.make_mesh((jax.device_count(),), ("d",), (jax.sharding.AxisType.Auto,))
cut = NamedSharding(mesh, P("d"))

def filled(shape, value):
    return jax.make_array_from_callback(
        shape, cut, lambda index: np.full(shape, value, "f4")[index])

tx = ringjax.allreduce_grads(bucket_bytes=64)
grads = {"a": filled((4, 7), 2.0**GROUP), "b": filled((50_004,), 2.0**GROUP)}
step = jax.jit(tx.update)

def warm_up(state):
    jax.block_until_ready(step(grads, state.tx))

@ringjax.elastic.run(warm_up=warm_up)
def train(state):
    peers = ringjax.replica_set().ranks
    say("from", state.step, ringjax.rank(), ringjax.size(), *peers)
    while not state.over:
        updates, state.tx = jax.block_until_ready(step(grads, state.tx))
        shards = [s.data for x in updates.values() for s in x.addressable_shards]
        (value,) = {float(v) for shard in shards for v in np.unique(shard)}
        say("step", state.step, value)
        state.step += 1
        time.sleep(0.005)
        if state.step % 5 == 0:
            over = ringjax.allreduce(np.float32(os.path.exists(END)), op=ringjax.Max)
            state.over = bool(over)
            state.commit()
    say("end", state.step)

train(ringjax.elastic.State(tx=tx.init(grads), step=0, over=False))
"""


@pytest.fixture
def start(start_job: StartJob) -> Callable[..., Job]:
    def begin(np: int, group: int = 2, devices: int = 1, **env: str) -> Job:
        variables = {**local_devices.environment(devices)(), **env}
        words = ["--group-size", str(group), "--min-np", str(group)]
        return start_job(np, STEPS, variables, words)

    return begin


def lines(job: Job, worker: int, word: str) -> list[list[str]]:
    found = [line.split() for line in job.output(worker).splitlines()]
    return [line[1:] for line in found if line[:1] == [word]]


def reach(job: Job, workers: set[int], steps: int, limit: float = 60) -> None:
    """Waits until each of them has made so many steps."""
    late = leaks.settle(
        lambda: [f"{w}" for w in workers if len(lines(job, w, "step")) < steps], limit
    )
    assert not late, f"workers {late} do not come to step {steps}\n{job.logs()}"


def joined(job: Job, worker: int) -> None:
    missing = leaks.settle(lambda: [] if lines(job, worker, "from") else ["it"], 60)
    assert not missing, f"worker {worker} does not come\n{job.logs()}"


def finish(job: Job, workers: set[int]) -> None:
    """Ends the job; its steps must be the same on all, each of one membership."""
    (job._folder / "script.py.end").touch()
    assert job.wait(60) == 0, job.logs()
    ends = {tuple(*lines(job, worker, "end")) for worker in workers}
    assert len(ends) == 1, job.logs()
    (steps,) = ends.pop()
    values: dict[str, str] = {}
    for worker in range(40):
        made = lines(job, worker, "step")
        for number, value in made:
            assert values.setdefault(number, value) == value, (number, job.logs())
        numbers = [int(number) for number, _ in made]
        # No step was made twice, and none was left out.
        assert numbers == list(range(numbers[0], numbers[0] + len(made))) if made else 1
    assert len(values) == int(steps), job.logs()
    groups = range(20)
    means = {
        sum(2.0**g for g in some) / len(some)
        for n in (1, 2, 3)
        for some in itertools.combinations(groups, n)
    }
    for value in map(float, values.values()):
        assert any(abs(value - mean) < 1e-6 * mean for mean in means), value


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_lost_rank_takes_its_group_along_and_a_new_one_comes(
    start: Callable[..., Job], victim: int
) -> None:
    job = start(4)
    reach(job, {0, 1, 2, 3}, 10)
    os.kill(job.rank_pid(victim), signal.SIGKILL)
    mate, others = victim ^ 1, {0, 1, 2, 3} - {victim, victim ^ 1}
    joined(job, 4)
    joined(job, 5)
    count = len(lines(job, min(others), "step"))
    reach(job, others, count + 10)
    finish(job, {*others, 4, 5})
    said = job.launcher_output()
    assert f"rank {victim} (worker {victim}, pid" in said
    why = rf"ended with its group, which lost rank {victim} \(.*\); 2 ranks go on"
    assert re.search(rf"rank {mate} \(worker {mate}, pid \d+\) {why}", said), said
    # New ones have the ranks behind those who stayed, at their places.
    assert lines(job, 4, "from")[0][1:] == ["2", "4", "0", "2"]
    assert lines(job, 5, "from")[0][1:] == ["3", "4", "1", "3"]


@pytest.mark.parametrize("point", ["moving", "complete", "closed"])
def test_a_rank_dies_within_a_call_and_all_shards_have_one_membership(
    start: Callable[..., Job], point: str
) -> None:
    deaths = f"call.{point}=kill@2#31;call.{point}=kill@5#77"
    job = start(6, RINGJAX_FAILPOINTS=deaths)
    reach(job, {0, 1}, 100)
    finish(job, {0, 1})
    said = job.launcher_output()
    for victim in (2, 5):
        assert f"(worker {victim}, pid" in said


def test_ranks_of_several_devices_are_replaced_and_get_their_shards(
    start: Callable[..., Job],
) -> None:
    job = start(2, group=1, devices=4)
    reach(job, {0, 1}, 10)
    os.kill(job.rank_pid(0), signal.SIGKILL)
    joined(job, 2)
    count = len(lines(job, 1, "step"))
    reach(job, {1}, count + 10)
    finish(job, {1, 2})


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_die_at_any_moment(start: Callable[..., Job], seed: int) -> None:
    chance = random.Random(seed)
    job = start(6)
    reach(job, set(range(6)), 5)
    newest, alive = 6, {0, 1, 2, 3, 4, 5}
    for _ in range(3):
        time.sleep(chance.random())
        victim = chance.choice(sorted(alive))
        os.kill(job.worker_pid(victim), signal.SIGKILL)
        alive -= {victim, victim ^ 1}
        for worker in (newest, newest + 1):
            joined(job, worker)
            alive.add(worker)
        newest += 2
    reach(job, alive, 5)
    finish(job, alive)


def test_a_group_that_is_asked_to_leave_leaves_whole(
    start: Callable[..., Job],
) -> None:
    job = start(4)
    reach(job, {0, 1, 2, 3}, 10)
    os.kill(job.rank_pid(2), signal.SIGTERM)
    count = len(lines(job, 0, "step"))
    reach(job, {0, 1}, count + 20)
    finish(job, {0, 1})
    said = job.launcher_output()
    assert "rank 2 (worker 2" in said and "rank 3 (worker 3" in said
    assert len(re.findall("has left", said)) == 2, said
    assert "lost" not in said, said
