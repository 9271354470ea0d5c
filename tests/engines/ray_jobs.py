"""Jobs on a real local cluster of Ray: what works, what fails, nodes that are lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from engines import programs
from ray.cluster_utils import Cluster
from ray.util.placement_group import get_current_placement_group

import ringjax.ray
from ringjax.errors import LaunchError
from ringjax.ray import ray_logger

pytestmark = [
    pytest.mark.timeout(180),
    # Of Ray, not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
EXTRA: Any = {"resources": {"extra": 1}, "object_store_memory": 80 << 20}
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for workers, and two nodes of two CPUs."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Aside(threading.Thread):
    """Runs something beside the test, which kills parts of it meanwhile."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__()
        self._fn, self.result, self.error = fn, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._fn()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        self.join(100)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


@pytest.mark.parametrize("size", [1, 3])
def test_a_function_on_workers(cluster: Cluster, size: int) -> None:
    results = ringjax.ray.run(programs.allreduce, (2.0,), num_workers=size)
    total = 2.0 * sum(range(1, size + 1))
    assert [(r, n, t) for r, n, _, t in results] == [
        (rank, size, total) for rank in range(size)
    ]


def test_ranks_of_a_node_follow_each_other(cluster: Cluster) -> None:
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


def test_no_room(cluster: Cluster) -> None:
    with pytest.raises(TimeoutError, match=r"no room .* missing: CPU: 1; .* CPU: 4, "):
        ringjax.ray.run(programs.allreduce, num_workers=5, start_timeout=1)
    with pytest.raises(
        TimeoutError,
        match=r"of at least 5 workers of CPU: 1 have started within 5.* s; missing: ",
    ):
        ringjax.ray.run(programs.allreduce, num_workers=(5, 6), start_timeout=5)


@pytest.mark.parametrize("number", [0, (0, 2), (3, 2)])
def test_bad_numbers(number: Any) -> None:
    with pytest.raises(ValueError, match="expected 1 <= least <= most"):
        ringjax.ray.run(programs.allreduce, num_workers=number)


def test_what_rank_0_logs_reaches_the_driver(cluster: Cluster) -> None:
    def fn() -> None:
        import ringjax

        ringjax.init()
        ray_logger.log({"rank": ringjax.rank()})

    seen: list[Any] = []
    ringjax.ray.run(fn, num_workers=2, callbacks=[seen.append])
    assert seen == [{"rank": 0}]


class Counter:
    """An executable: what it holds stays from call to call."""

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


def test_a_killed_worker_is_replaced_and_the_others_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = Aside(
        lambda: ringjax.ray.run(
            programs.train, (str(tmp_path), 1500), num_workers=(2, 3)
        )
    )
    programs.wait_for_sizes(tmp_path, 3, 3)
    first = {int(file.name) for file in tmp_path.iterdir()}
    victim = max(first)
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    programs.wait_for_sizes(tmp_path, 3, 4)
    results = job.end()
    assert [result["rank"] for result in results] == [0, 1, 2]
    stayed = [result for result in results if result["pid"] in first - {victim}]
    assert len(stayed) == 2
    for result in stayed:
        assert _from(3, result) == [3, 2, 3]
        lost = min(w for _, size, w in result["sizes"] if size == 2 and w > killed)
        print(f"the next step of a survivor came {lost - killed:.2f} s after the kill")


def _from(least: int, result: dict[str, Any]) -> list[int]:
    """The sizes of the job that a worker saw, from the first time it was so large."""
    sizes = [size for _, size, _ in result["sizes"]]
    return sizes[sizes.index(least) :]


def test_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1, **EXTRA)
    stays = cluster.add_node(num_cpus=1, **EXTRA)
    needs = {"CPU": 1, "extra": 1}
    job = Aside(
        lambda: ringjax.ray.run(
            programs.train,
            (str(tmp_path), 1500),
            num_workers=(1, 2),
            resources_per_worker=needs,
        )
    )
    programs.wait_for_sizes(tmp_path, 2, 2)
    first = {int(file.name) for file in tmp_path.iterdir()}
    lost = time.time()
    cluster.remove_node(node, allow_graceful=False)
    programs.wait_for_sizes(tmp_path, 1, 1)
    again = cluster.add_node(num_cpus=1, **EXTRA)
    programs.wait_for_sizes(tmp_path, 2, 2)
    results = job.end()
    survivor = next(result for result in results if result["pid"] in first)
    assert _from(2, survivor) == [2, 1, 2]
    steps = [when for _, size, when in survivor["sizes"] if size == 1 and when > lost]
    print(f"the next step of the survivor came {steps[0] - lost:.2f} s after the loss")
    for extra in (stays, again):
        with contextlib.suppress(Exception):
            cluster.remove_node(extra)


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


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_train_replaces_a_worker_and_keeps_the_others(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def train(config: dict[str, str]) -> None:
        import ringjax

        ringjax.init()
        if ringjax.rank() == 1 and not Path(config["folder"], "failed").exists():
            threading.Thread(target=fail, args=[config["folder"]]).start()
        done = programs.train(config["folder"], 600)
        Path(config["folder"], f"sizes{done['rank']}").write_text(
            " ".join(str(size) for _, size, _ in done["sizes"])
        )

    def fail(folder: str) -> None:
        programs.wait_for_sizes(Path(folder), 2, 2)
        Path(folder, "failed").touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        import ringjax
        from ringjax.runtime import visit

        visit.fail(ValueError("boom"))
        assert not ringjax.is_initialized()

    result = DataParallelTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        backend_config=ringjax.ray.RingConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(tmp_path / "storage"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    assert result.error is None
    assert (tmp_path / "sizes0").read_text() == "2 1 2"
    assert (tmp_path / "sizes1").read_text() == "2"


def test_train_without_elastic(cluster: Cluster, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def train(config: dict[str, str]) -> None:
        text = " ".join(map(str, programs.allreduce()))
        Path(config["folder"], text.split()[0]).write_text(text)

    DataParallelTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        backend_config=ringjax.ray.RingConfig(elastic=False),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    ).fit()
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text().startswith(f"{rank} 3 ")
