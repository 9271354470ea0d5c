"""Jobs on a local Ray cluster: results, failures, and executors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from engines import programs
from engines.clusters import MARKS, SMALL, ray_cluster
from ray.cluster_utils import Cluster
from ray.util.placement_group import get_current_placement_group

import ringjax.ray
from ringjax.errors import LaunchError
from ringjax.ray import ray_logger

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes with two CPUs each."""
    with ray_cluster() as cluster:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **SMALL)
        yield cluster


@pytest.mark.parametrize("size", [1, 3])
def test_a_function_on_workers(cluster: Cluster, size: int) -> None:
    results = ringjax.ray.run(programs.allreduce, (2.0,), num_workers=size)
    total = 2.0 * sum(range(1, size + 1))
    assert [(r, n, t) for r, n, _, t in results] == [
        (rank, size, total) for rank in range(size)
    ]


def test_ranks_of_a_node_are_consecutive(cluster: Cluster) -> None:
    results = ringjax.ray.run(
        programs.allreduce, num_workers=4, placement_strategy="SPREAD"
    )
    assert [local for _, _, local, _ in results] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 \(on .*\): ValueError: boom"),
        ("kill", r"rank 1 \(on .*\): its process or node is gone \(ActorDiedError"),
    ],
)
def test_the_first_to_fail_is_named(cluster: Cluster, how: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=message) as caught:
        ringjax.ray.run(programs.fails, (1, how), num_workers=3)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 60


def test_too_few_resources_are_an_error(cluster: Cluster) -> None:
    with pytest.raises(TimeoutError, match=r"no room .* missing: CPU: 1; .* CPU: 4, "):
        ringjax.ray.run(programs.allreduce, num_workers=5, start_timeout=1)
    with pytest.raises(
        TimeoutError,
        match=r"of at least 5 workers of CPU: 1 have started within 5.* s; missing: ",
    ):
        ringjax.ray.run(programs.allreduce, num_workers=(5, 6), start_timeout=5)


@pytest.mark.parametrize("number", [0, (0, 2), (3, 2)])
def test_bad_numbers_of_workers_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="expected 1 <= least <= most"):
        ringjax.ray.run(programs.allreduce, num_workers=number)


def test_what_ranks_log_reaches_the_driver(cluster: Cluster) -> None:
    def fn() -> None:
        import ringjax

        ringjax.init()
        ray_logger.log({"rank": ringjax.rank()})
        ray_logger.log({"chief": ringjax.rank()}, chief_only=True)

    seen: list[dict[str, int]] = []
    ringjax.ray.run(fn, num_workers=2, callbacks=[seen.append])
    assert sorted(str(d) for d in seen) == [
        "{'chief': 0}",
        "{'rank': 0}",
        "{'rank': 1}",
    ]


class Counter:
    """An executable of an executor, which keeps its attributes between calls."""

    def __init__(self, start: int, step: int = 1) -> None:
        import ringjax

        ringjax.init()
        self.count, self.step = start + ringjax.rank(), step

    def add(self) -> int:
        self.count += self.step
        return self.count


def test_executor(cluster: Cluster) -> None:
    settings = ringjax.ray.RayExecutor.create_settings(timeout_s=30)
    executor = ringjax.ray.RayExecutor(settings, num_workers=2)
    executor.start(Counter, [10], {"step": 5}, extra_env_vars={"OURS": "yes"})
    try:
        assert executor.execute(lambda counter: counter.add()) == [15, 16]
        assert executor.execute(lambda counter: counter.add()) == [20, 21]
        assert executor.execute_single(lambda counter: counter.count) == 20
        assert executor.run(programs.allreduce, [1.0]) == [
            (0, 2, 0, 3.0),
            (1, 2, 1, 3.0),
        ]
        assert ray.get(executor.run_remote(os.getenv, ["OURS"])) == ["yes", "yes"]
        with pytest.raises(LaunchError, match=r"rank [01] .*ZeroDivisionError"):
            executor.run(lambda: 1 // 0)
        assert [r for r, *_ in executor.run(programs.allreduce)] == [0, 1]
        variables = ray.get([w.env_vars.remote() for w in executor.adapter.workers])
        assert [v["HOROVOD_RANK"] for v in variables] == ["0", "1"]
    finally:
        executor.shutdown()


def test_executor_on_hosts(cluster: Cluster) -> None:
    settings = ringjax.ray.RayExecutor.create_settings(placement_group_timeout_s=2)
    executor = ringjax.ray.RayExecutor(settings, num_hosts=2, num_workers_per_host=2)
    executor.start()
    try:
        results = executor.run(programs.allreduce)
    finally:
        executor.shutdown()
    assert [local for _, _, local, _ in results] == [0, 1, 0, 1]
    with pytest.raises(TimeoutError, match="STRICT_SPREAD"):
        ringjax.ray.RayExecutor(settings, num_hosts=3).start()


def test_executor_in_the_placement_group_it_runs_in(cluster: Cluster) -> None:
    @ray.remote(num_cpus=0)
    def driver() -> list[Any]:
        settings = ringjax.ray.RayExecutor.create_settings()
        executor = ringjax.ray.RayExecutor(settings, num_workers=2)
        executor.start()
        try:
            mine = get_current_placement_group().id.hex()

            def fn() -> Any:
                group = ray.util.get_current_placement_group()
                return (*programs.allreduce(), group.id.hex() == mine)

            return executor.run(fn)
        finally:
            executor.shutdown()

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    found = ray.get(driver.options(scheduling_strategy=strategy).remote())
    ray.util.remove_placement_group(group)
    assert found == [(0, 2, 0, 3.0, True), (1, 2, 1, 3.0, True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 2, "num_hosts": 1}, "Both `num_workers` and `num_hosts`"),
        ({"num_workers": 2, "min_workers": 1}, "Both `min_workers` and `num_workers`"),
        ({"max_workers": 2}, "without a positive `min_workers`"),
        ({}, "Give `num_workers`, `num_hosts` or `min_workers`"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "use_gpu is False"),
    ],
)
def test_executor_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ringjax.ray.RayExecutor(None, **arguments)  # type: ignore[arg-type]


def test_elastic_executors(cluster: Cluster, tmp_path: Path) -> None:
    settings = ringjax.ray.ElasticRayExecutor.create_settings(min_np=1, max_np=2)
    executor = ringjax.ray.ElasticRayExecutor(settings, env_vars={"OURS": "yes"})
    executor.start()

    def fn() -> Any:
        return programs.train(str(tmp_path), 5)["rank"], os.getenv("OURS")

    assert executor.run(fn) == [(0, "yes"), (1, "yes")]
    other = ringjax.ray.RayExecutor(None, min_workers=1, max_workers=2)
    other.start()
    assert other.run(programs.train, [str(tmp_path), 5])[0]["rank"] == 0
    with pytest.raises(NotImplementedError):
        other.run_remote(fn)


def test_a_program_that_always_fails_ends(cluster: Cluster) -> None:
    def fn() -> None:
        import ringjax

        ringjax.init()
        raise ValueError("always")

    with pytest.raises(LaunchError, match="ValueError: always"):
        ringjax.ray.run(fn, num_workers=(1, 2))
