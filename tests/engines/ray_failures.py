"""Losses in a running job on Ray: workers, nodes, the raylet of a node, the driver.

The times in docs/developers/engine-tests.md were measured by
`KILLS=20 SEED=7 pytest -s tests/engines/ray_failures.py -k random`.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from engines import programs
from engines.clusters import MARKS, SMALL, JobThread, ray_cluster
from ray.cluster_utils import Cluster

import ringjax.ray

pytestmark = MARKS
ONE_WORKER_NODE = {"num_cpus": 1, "resources": {"one": 1}, **SMALL}
NEEDS = {"CPU": 1, "one": 1}
SIZE = 3
KILLS = int(os.environ.get("KILLS", "4"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with a node for each worker, and short timeouts for silent nodes."""
    timeouts = {"health_check_period_ms": 1000, "health_check_timeout_ms": 1000}
    with ray_cluster(_system_config=timeouts) as cluster:
        for _ in range(SIZE):
            cluster.add_node(**ONE_WORKER_NODE)
        yield cluster


def run(folder: Path) -> None:
    results = ringjax.ray.run(
        programs.train,
        (str(folder), 10**6),
        num_workers=(1, SIZE),
        resources_per_worker=NEEDS,
    )
    assert len(results) == SIZE


def fit(folder: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    result = DataParallelTrainer(
        lambda: programs.train(str(folder), 10**6),
        backend_config=ringjax.ray.RingConfig(),
        scaling_config=ScalingConfig(num_workers=SIZE, resources_per_worker=NEEDS),
        run_config=RunConfig(
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()
    assert result.error is None


@contextlib.contextmanager
def training(
    folder: Path, start: Callable[[Path], None] = run, size: int = SIZE
) -> Iterator[JobThread]:
    """Runs an elastic job, which begins with `size` workers, until the block ends."""
    job = JobThread(lambda: start(folder))
    try:
        programs.wait_for_sizes(folder, size, size)
        yield job
    finally:
        Path(folder, "stop").touch()
        job.join(30)


def pids(folder: Path, size: int, since: float) -> dict[int, float]:
    """Returns the processes in a job of `size` after `since`, and their first times."""
    found: dict[int, float] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines() if file.name.isdigit() else ():
            _, ranks, when = line.split()
            if int(ranks) == size and float(when) > since:
                found.setdefault(int(file.name), float(when))
    return found


def wait_for_size(size: int, folder: Path, since: float) -> dict[int, float]:
    """Waits until `pids` finds `size` processes, and returns them."""

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


@pytest.mark.timeout(120 + 25 * KILLS)
@pytest.mark.parametrize(
    ("start", "kinds"), [(run, ("worker", "node")), (fit, ("worker", "all"))]
)
def test_random_kills(
    cluster: Cluster, tmp_path: Path, start: Any, kinds: tuple[str, ...]
) -> None:
    """The other workers finish their step, and lost workers are soon replaced."""
    rng = random.Random(int(os.environ.get("SEED", "1")))
    durations: dict[str, list[float]] = {}
    with training(tmp_path, start) as job:
        living = set(pids(tmp_path, SIZE, 0))
        for turn in range(KILLS):
            # A worker that fails soon after its start would be replaced only after a
            # pause.
            time.sleep(rng.uniform(3, 4))
            kind = kinds[turn % 2]
            begin = time.time()
            if kind == "node":
                node = rng.choice(list(cluster.worker_nodes))
                cluster.remove_node(node, allow_graceful=False)
            victims = {"node": [], "all": living, "worker": [rng.choice([*living])]}
            for pid in victims[kind]:
                os.kill(pid, signal.SIGKILL)
            left: dict[int, float] = {}
            if kind != "all":
                left = wait_for_size(SIZE - 1, tmp_path, begin)
                assert left.keys() < living, "a survivor was restarted"
                seconds = max(left.values()) - begin
                durations.setdefault(f"{kind} killed, next step", []).append(seconds)
            if kind == "node":
                cluster.add_node(**ONE_WORKER_NODE)
            back = wait_for_size(SIZE, tmp_path, max([begin, *left.values()]))
            assert left.keys() < back.keys()
            living = set(back)
            seconds = max(back.values()) - begin
            durations.setdefault(f"{kind} killed, full size", []).append(seconds)
            print(kind, f"{seconds:.2f} s")
    job.end()
    for title, found in durations.items():
        ms = sorted(round(1000 * seconds) for seconds in found)
        print(f"{title}: median {statistics.median(ms)} ms, most {ms[-1]} of {len(ms)}")


def test_a_spare_takes_the_place_of_a_lost_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    def start(folder: Path) -> None:
        results = ringjax.ray.run(
            programs.train_noting_the_start,
            (str(folder),),
            num_workers=(1, SIZE - 1),
            spares=1,
            resources_per_worker=NEEDS,
        )
        assert len(results) == SIZE - 1

    with training(tmp_path, start, SIZE - 1) as job:
        started = programs.wait_for_start(tmp_path, SIZE)
        members = pids(tmp_path, SIZE - 1, 0)
        begin = time.time()
        os.kill(max(members), signal.SIGKILL)
        # The spare may join before the next step, so perhaps none has one worker less.
        joined = wait_for(
            lambda: pids(tmp_path, SIZE - 1, begin).keys() - members.keys()
        )
        assert {str(pid) for pid in joined} <= started
        programs.wait_for_start(tmp_path, SIZE + 1)
    job.end()


def test_three_spares_that_fail_in_a_row_are_enough(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(folder: Path) -> None:
        results = ringjax.ray.run(
            programs.train,
            (str(folder), 10**6),
            {"warm_up": programs.broken_warm_up},
            num_workers=(SIZE - 1, SIZE - 1),
            spares=1,
            resources_per_worker=NEEDS,
        )
        assert len(results) == SIZE - 1

    with training(tmp_path, start, SIZE - 1) as job:
        gave_up = "no more spares are started: 3 in a row have failed"
        wait_for(lambda: gave_up in caplog.text)
    job.end()
    assert caplog.text.count("ValueError: boom") == 3


def test_a_paused_raylet_does_not_stop_the_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The worker continues until Ray declares its node dead; then the job shrinks."""
    with training(tmp_path) as job:
        living = set(pids(tmp_path, SIZE, 0))
        node = next(iter(cluster.worker_nodes))
        raylet = node.all_processes["raylet"][0].process.pid
        begin = time.time()
        os.kill(raylet, signal.SIGSTOP)
        try:
            time.sleep(3)
            assert not pids(tmp_path, SIZE - 1, begin), "the job has shrunk"
            os.kill(raylet, signal.SIGCONT)
            time.sleep(1)
            assert not pids(tmp_path, SIZE - 1, begin), "the job has shrunk"
            begin = time.time()
            os.kill(raylet, signal.SIGSTOP)
            left = wait_for_size(SIZE - 1, tmp_path, begin)
            print(f"declared dead after {max(left.values()) - begin:.1f} s")
            assert left.keys() < living
        finally:
            os.kill(raylet, signal.SIGCONT)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(**ONE_WORKER_NODE)
        wait_for_size(SIZE, tmp_path, max(left.values()))
    job.end()


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


def test_a_node_lost_between_reservation_and_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors of a ready placement group never start, so their start has a deadline."""
    from ringjax.ray import strategy

    node = cluster.add_node(num_cpus=1, resources={"rare": 1}, **SMALL)
    create = strategy.create_placement_group

    def create_and_lose_node(*args: Any) -> Any:
        group = create(*args)
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: "rare" not in ray.cluster_resources())
        return group

    monkeypatch.setattr(strategy, "create_placement_group", create_and_lose_node)
    monkeypatch.setattr(strategy, "_PROCESSES", 0)
    with pytest.raises(
        TimeoutError, match=r"1 of 1 workers .* have not started .* missing: rare: 1"
    ):
        ringjax.ray.run(
            programs.allreduce,
            num_workers=1,
            resources_per_worker={"CPU": 1, "rare": 1},
            start_timeout=5,
        )
