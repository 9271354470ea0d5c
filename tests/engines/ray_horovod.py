"""Horovod's API for Ray on a real cluster: a client, GPUs, custom host discoveries."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from engines import programs
from engines.clusters import MARKS, SMALL, JobThread, ray_cluster
from ray.cluster_utils import Cluster

import ringjax.ray
from ringjax.ray.runner import Coordinator, RayExecutor
from ringjax.ray.strategy import (
    ColocatedStrategy,
    PGStrategy,
    create_placement_group,
)
from ringjax.ray.utils import detect_nics, map_blocking, nics_to_env_var
from ringjax.ray.worker import BaseHorovodWorker
from ringjax.runner.elastic.discovery import HostDiscovery

pytestmark = MARKS
HOSTS = {f"node:host-{n}": 1 for n in range(4)}
SETTINGS = {"placement_group_timeout_s": 5}
# The driver is a Ray client, so an actor on the cluster manages the job.
CLIENT = """
import os, sys, tempfile, time

import ray
import ringjax.ray
from engines import programs
from ringjax.errors import LaunchError
from ringjax.ray import ray_logger

try:
    ray.init(sys.argv[1])
except ConnectionAbortedError:  # the server aborts if its process needs over 30 s
    ray.init(sys.argv[1])
assert ray.util.client.ray.is_connected()
os.environ["RINGJAX_HEARTBEAT_INTERVAL"] = "0.7"


def fails(call, kind, words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"no {kind.__name__}")


def logs():
    import ringjax

    ringjax.init()
    ray_logger.log({"rank": ringjax.rank()}, chief_only=True)
    return os.environ.get("RINGJAX_HEARTBEAT_INTERVAL")


run, seen = ringjax.ray.run, []
assert run(programs.allreduce, (2.0,), num_workers=2)[1] == (1, 2, 1, 6.0)
assert run(logs, num_workers=(2, 2), callbacks=[seen.append]) == ["0.7", "0.7"]
assert seen == [{"rank": 0}]
error = fails(
    lambda: run(programs.fails, (1, "raise"), num_workers=2),
    LaunchError, ["rank 1", "ValueError: boom"],
)
assert error.rank == 1
for many in 9, (9, 9):
    fails(
        lambda: run(logs, num_workers=many, start_timeout=1),
        TimeoutError, ["missing: CPU: 5"],
    )

settings = ringjax.ray.RayExecutor.create_settings(placement_group_timeout_s=2)
executor = ringjax.ray.RayExecutor(settings, num_workers=2)
executor.start()
assert [r for r, *_ in executor.run(programs.allreduce)] == [0, 1]
assert [r for r, *_ in ray.get(executor.run_remote(programs.allreduce))] == [0, 1]
assert executor.execute(lambda _: logs(), callbacks=[seen.append]) == ["0.7", "0.7"]
assert len(seen) == 2 and executor.execute_single(lambda _: 5) == 5
executor.shutdown()
fails(
    ringjax.ray.RayExecutor(settings, num_workers=9).start, TimeoutError, ["PACK of 9"]
)
deadline = time.monotonic() + 20
while ray.available_resources().get("CPU") != 4:
    assert time.monotonic() < deadline, "something is left on the cluster"
    time.sleep(0.1)

folder = tempfile.mkdtemp()
settings = ringjax.ray.ElasticRayExecutor.create_settings(min_np=2)
executor = ringjax.ray.ElasticRayExecutor(settings, env_vars={"DRIVER": "yes"})
executor.start()
found = executor.run(lambda: (programs.train(folder, 20)["rank"], os.environ["DRIVER"]))
assert found == [(rank, "yes") for rank in range(4)], found
print("done")
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_client(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="a client needs ray[client]")
    port = free_port()
    with ray_cluster(connect=False, num_cpus=4, ray_client_server_port=port):
        words = [sys.executable, "-W", "ignore", "-c", CLIENT]
        done = subprocess.run(
            [*words, f"ray://127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=150,
        )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with four CPUs, two simulated GPUs, and several simulated hosts."""
    with ray_cluster() as cluster:
        cluster.add_node(num_cpus=4, num_gpus=2, resources=HOSTS, **SMALL)
        yield cluster


@pytest.mark.parametrize("sizes", [{"num_workers": 2}, {"num_hosts": 1}])
def test_workers_of_a_node_see_all_its_gpus(
    cluster: Cluster, sizes: dict[str, int]
) -> None:
    settings = RayExecutor.create_settings(**SETTINGS)
    executor = RayExecutor(settings, num_workers_per_host=2, use_gpu=True, **sizes)
    executor.start()
    try:
        seen = executor.execute(lambda _: os.environ["CUDA_VISIBLE_DEVICES"])
    finally:
        executor.shutdown()
    assert len(set(seen)) == 1 and sorted(seen[0].split(",")) == ["0", "1"]


def test_fewer_gpus_than_workers(cluster: Cluster) -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=3, use_gpu=True)
    with pytest.raises(TimeoutError, match=r"PACK of 3 x CPU: 1, GPU: 1 .*: GPU: 1;"):
        executor.start()
    executor.shutdown()


def test_the_placement_group_of_the_driver(cluster: Cluster) -> None:
    """Uses an existing group as Horovod's tests do: in an actor, without a GPU."""
    group, bundles = create_placement_group({"CPU": 1, "GPU": 0}, 2, 30, "PACK")
    assert bundles == [{"CPU": 1, "GPU": 0}] * 2

    @ray.remote(num_cpus=0)
    class Driver:
        def run(self) -> Any:
            executor = RayExecutor(
                RayExecutor.create_settings(**SETTINGS),
                num_workers=2,
                num_hosts=None,
                num_workers_per_host=None,
            )
            executor.start()
            try:
                made = executor.adapter.strategy._created_placement_group
                return made, [rank for rank, *_ in executor.run(programs.allreduce)]
            finally:
                executor.shutdown()

    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    driver = Driver.options(scheduling_strategy=strategy).remote()
    assert ray.get(driver.run.remote()) == (False, [0, 1])
    ray.util.remove_placement_group(group)


def test_strategies(cluster: Cluster) -> None:
    """A strategy starts workers without an executor."""
    settings = RayExecutor.create_settings(**SETTINGS)
    needs: dict[str, Any] = {"cpus_per_worker": 1, "gpus_per_worker": 1}
    needs |= {"settings": settings, "use_gpu": True}
    for strategy in (
        PGStrategy(num_workers=2, **needs),
        ColocatedStrategy(num_hosts=1, num_workers_per_host=2, **needs),
    ):
        assert strategy.num_workers == 2
        workers, of_nodes = strategy.create_workers()
        try:
            assert len(workers) == 2 and of_nodes == workers[1:]
            seen = map_blocking(lambda worker: worker.env_vars.remote(), workers)
            gpus = [sorted(env["CUDA_VISIBLE_DEVICES"]) for env in seen]
            assert gpus == [[",", "0", "1"]] * 2
        finally:
            strategy.shutdown()
        assert strategy.placement_group is None
    with pytest.raises(TimeoutError, match="STRICT_SPREAD of 2"):
        ColocatedStrategy(num_hosts=2, num_workers_per_host=1, **needs).create_workers()


def test_a_custom_backend(cluster: Cluster) -> None:
    """Starts a job as Ray's Horovod backend does: actors, coordinator, variables."""
    settings = RayExecutor.create_settings(timeout_s=30)
    coordinator = Coordinator(settings)
    workers = [ray.remote(num_cpus=1)(BaseHorovodWorker).remote(n, 2) for n in (0, 1)]
    try:
        nodes = map_blocking(lambda w: w.node_id.remote(), workers)
        names = map_blocking(lambda w: w.hostname.remote(), workers)
        for rank, (node, name) in enumerate(zip(nodes, names, strict=True)):
            coordinator.register(name, node, rank)
        places = coordinator.finalize_registration()
        common = coordinator.establish_rendezvous()
        common |= nics_to_env_var(detect_nics(settings, names, workers))
        setting = [
            worker.update_env_vars.remote({**common, **places[rank]})
            for rank, worker in enumerate(workers)
        ]
        ray.get(setting)
        found = ray.get([w.execute.remote(_allreduce, True) for w in workers])
        assert found == [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]
    finally:
        coordinator.close()
        for worker in workers:
            ray.kill(worker)


def _allreduce(_: Any) -> Any:
    return programs.allreduce()


class ChangingHosts(HostDiscovery):
    """A host discovery whose hosts the test changes."""

    def __init__(self, **hosts: int) -> None:
        self.hosts: Mapping[str, int] = hosts

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return {name.replace("_", "-"): slots for name, slots in self.hosts.items()}


@pytest.mark.parametrize("kind", ["RayExecutor", "ElasticRayExecutor"])
def test_a_custom_host_discovery(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """Workers start and end with the discovered hosts; the other workers stay."""
    discovery = ChangingHosts(host_1=1)
    executor: Any
    if kind == "RayExecutor":
        settings: Any = RayExecutor.create_settings()
        executor = RayExecutor(
            settings, min_workers=1, max_workers=3, override_discovery=False
        )
    else:
        settings = ringjax.ray.ElasticRayExecutor.create_settings(max_num_proc=3)
        executor = ringjax.ray.ElasticRayExecutor(settings, override_discovery=False)
    settings.discovery = discovery
    executor.start()
    job = JobThread(lambda: executor.run(lambda: programs.train(str(tmp_path), 10**6)))
    try:
        programs.wait_for_sizes(tmp_path, 1, 1)
        first = {int(file.name) for file in tmp_path.iterdir()}
        discovery.hosts = {"host_1": 1, "host_2": 2, "host_3": 1}
        programs.wait_for_sizes(tmp_path, 3, 3)
        discovery.hosts = {"host_1": 1, "host_3": 1}
        programs.wait_for_sizes(tmp_path, 1, 1)
        discovery.hosts = {"host_1": 2}
        programs.wait_for_sizes(tmp_path, 2, 2)
    finally:
        (tmp_path / "stop").touch()
    results = job.end()
    assert len(results) == 2
    assert first < {result["pid"] for result in results}
