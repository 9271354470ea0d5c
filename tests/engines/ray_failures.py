"""What Ray loses while a job runs: workers, nodes, a node's daemon, the driver.

`KILLS=20 SEED=7 pytest -s tests/engines/ray_failures.py -k random` is how the times in
docs/engines.md were measured.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from engines import programs
from engines.clusters import SMALL, Aside, ray_cluster
from ray.cluster_utils import Cluster

import ringjax.ray

pytestmark = [
    pytest.mark.timeout(170),
    # Of Ray, not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
ONE = {"num_cpus": 1, "resources": {"one": 1}, **SMALL}  # a node for one worker
NEEDS = {"CPU": 1, "one": 1}
SIZE = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node for each of the workers; Ray gives a silent one up sooner than else."""
    soon = {"health_check_period_ms": 1000, "health_check_timeout_ms": 1000}
    with ray_cluster(_system_config=soon) as cluster:
        for _ in range(SIZE):
            cluster.add_node(**ONE)
        yield cluster


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Aside]:
    """An elastic job with a worker on each node; ends when the block does."""
    job = Aside(
        lambda: ringjax.ray.run(
            programs.train,
            (str(folder), 10**6),
            num_workers=(1, SIZE),
            resources_per_worker=NEEDS,
        )
    )
    try:
        programs.wait_for_sizes(folder, SIZE, SIZE)
        yield job
    finally:
        Path(folder, "stop").touch()
        job.join(30)


def pids(folder: Path, size: int, since: float) -> dict[int, float]:
    """Processes that were in a job of so many after a time -> when first after it."""
    found: dict[int, float] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines() if file.name.isdigit() else ():
            _, ranks, when = line.split()
            if int(ranks) == size and float(when) > since:
                found.setdefault(int(file.name), float(when))
    return found


def in_a_job_of(size: int, folder: Path, since: float) -> dict[int, float]:
    """The first processes that were in one after that time, as `pids`."""

    def all_of_them() -> dict[int, float] | None:
        found = pids(folder, size, since)
        return found if len(found) == size else None

    return wait_for(all_of_them)


def wait_for(condition: Any, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise TimeoutError(condition)


def test_random_kills(cluster: Cluster, tmp_path: Path) -> None:
    """The others finish their step, and the job is as large as before soon after."""
    dice = random.Random(int(os.environ.get("SEED", "1")))
    taken: dict[str, list[tuple[float, float]]] = {"worker": [], "node": []}
    with training(tmp_path) as job:
        living = set(pids(tmp_path, SIZE, 0))
        for round in range(int(os.environ.get("KILLS", "4"))):
            time.sleep(dice.uniform(0.1, 1.0))
            kind = ["worker", "node"][round % 2]
            begin = time.time()
            if kind == "worker":
                os.kill(dice.choice(sorted(living)), signal.SIGKILL)
            else:
                node = dice.choice(list(cluster.worker_nodes))
                cluster.remove_node(node, allow_graceful=False)
            left = in_a_job_of(SIZE - 1, tmp_path, begin)
            assert left.keys() < living, "a survivor has begun anew"
            if kind == "node":
                cluster.add_node(**ONE)
            back = in_a_job_of(SIZE, tmp_path, max(left.values()))
            assert left.keys() < back.keys()
            living = set(back)
            again = max(back.values()) - begin
            taken[kind].append((max(left.values()) - begin, again))
    assert len(job.end()) == SIZE
    for kind, times in taken.items():
        next_step, as_before = zip(*times, strict=True)
        for what, found in ("next step", next_step), ("as before", as_before):
            ms = sorted(1000 * t for t in found)
            print(
                f"{kind} killed, {what}: median {statistics.median(ms):.0f} ms, "
                f"most {ms[-1]:.0f} ms of {len(ms)}"
            )


def test_a_paused_daemon_of_a_node_stops_nobody(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its worker trains on; once Ray gives the node up, the others go on without it."""
    with training(tmp_path) as job:
        living = set(pids(tmp_path, SIZE, 0))
        node = next(iter(cluster.worker_nodes))
        raylet = node.all_processes["raylet"][0].process.pid
        begin = time.time()
        os.kill(raylet, signal.SIGSTOP)
        try:
            time.sleep(3)
            assert not pids(tmp_path, SIZE - 1, begin), "the job noticed"
            os.kill(raylet, signal.SIGCONT)
            time.sleep(1)
            assert not pids(tmp_path, SIZE - 1, begin), "the job noticed"
            begin = time.time()
            os.kill(raylet, signal.SIGSTOP)
            left = in_a_job_of(SIZE - 1, tmp_path, begin)
            print(f"given up after {max(left.values()) - begin:.1f} s")
            assert left.keys() < living
        finally:
            os.kill(raylet, signal.SIGCONT)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(**ONE)
        in_a_job_of(SIZE, tmp_path, max(left.values()))
    assert len(job.end()) == SIZE


DRIVER = """
import sys
import ray
import ringjax.ray
from engines import programs

ray.init(address=sys.argv[1], log_to_driver=False)
ringjax.ray.run(programs.train, (sys.argv[2], 10**6), num_workers=eval(sys.argv[3]))
"""


@pytest.mark.parametrize("size", ["3", "(1, 3)"])
def test_no_worker_outlives_its_driver(
    cluster: Cluster, tmp_path: Path, size: str
) -> None:
    words = [sys.executable, "-W", "ignore", "-c", DRIVER, cluster.address]
    driver = subprocess.Popen([*words, str(tmp_path), size], stderr=subprocess.PIPE)
    try:
        programs.wait_for_sizes(tmp_path, 3, 3)
        driver.kill()
        begin = time.monotonic()
        workers = [int(f.name) for f in tmp_path.iterdir()]
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 30)
        print(f"all workers have ended after {time.monotonic() - begin:.2f} s")
        wait_for(lambda: ray.available_resources().get("CPU") == SIZE)
    finally:
        driver.kill()
        driver.communicate()


def test_a_node_that_is_lost_between_room_and_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group was ready; its actors never start, and there is a deadline for them."""
    from ringjax.ray import actors, static_jobs

    node = cluster.add_node(num_cpus=1, resources={"rare": 1}, **SMALL)
    group_of = actors.group_of

    def and_then_lose_it(*args: Any) -> Any:
        group = group_of(*args)
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: "rare" not in ray.cluster_resources())
        return group

    monkeypatch.setattr(actors, "group_of", and_then_lose_it)
    monkeypatch.setattr(static_jobs, "_PROCESSES", 0)
    with pytest.raises(
        TimeoutError, match=r"1 of 1 workers .* have not started .* missing: rare: 1"
    ):
        ringjax.ray.run(
            programs.allreduce,
            num_workers=1,
            resources_per_worker={"CPU": 1, "rare": 1},
            start_timeout=5,
        )
