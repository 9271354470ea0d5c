"""Tests of Horovod's names for Ray, with a stub of Ray: arguments, settings, ranks.

tests/engines has the tests on a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringjax.errors import LaunchError
from ringjax.run.engine_job import EngineJob

NAMES = {
    "ray": "remote is_initialized init wait get put kill nodes",
    "ray.exceptions": "RayError RayTaskError GetTimeoutError",
    "ray.util": "",
    "ray.util.client": "",
    "ray.util.placement_group": "PlacementGroup get_current_placement_group "
    "placement_group remove_placement_group",
    "ray.util.queue": "Empty Queue",
    "ray.util.scheduling_strategies": "PlacementGroupSchedulingStrategy",
}


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Replaces the module `ray` by a stub, whose classes do nothing."""
    for name in _ours():
        monkeypatch.delitem(sys.modules, name)
    for name, contents in NAMES.items():
        module = ModuleType(name)
        for item in contents.split():
            kind = type(item, (Exception,), {"__init__": lambda self, *_, **__: None})
            setattr(module, item, kind)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    yield sys.modules["ray"]
    for name in _ours():
        del sys.modules[name]


def _ours() -> list[str]:
    names = ("ringjax.ray", "ringjax.runner.elastic.discovery")
    return [name for name in sys.modules if name.startswith(names)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 2, "num_hosts": 1}, "Both `num_workers` and `num_hosts`"),
        ({"num_workers": 2, "min_workers": 1}, "Both `min_workers` and `num_workers`"),
        ({"max_workers": 2}, "`max_workers` provided without a positive `min_work"),
        ({"min_workers": 0, "max_workers": 2}, "without a positive `min_workers`"),
        ({}, "Give `num_workers`, `num_hosts` or `min_workers`"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "use_gpu is False"),
        ({"min_workers": 1, "cooldown_range": (5, 2)}, "expected 0 < least <= most"),
        (
            {"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0},
            "gpus_per_worker=0: expected more than 0",
        ),
    ],
)
def test_contradictory_arguments_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    from ringjax.ray import RayExecutor

    with pytest.raises(ValueError, match=message):
        RayExecutor(None, **arguments)


def test_resources_follow_from_arguments() -> None:
    from ringjax.ray import RayExecutor

    executor = RayExecutor(
        None, num_hosts=2, num_workers_per_host=3, cpus_per_worker=2, use_gpu=True
    )
    assert executor.params.resources() == {"CPU": 2.0, "GPU": 1.0}
    assert not executor.params.elastic and not executor.settings.elastic
    assert RayExecutor(None, min_workers=1).params.elastic
    executor.shutdown()  # nothing was started
    with pytest.raises(ValueError, match=r"execute: call start\(\) first"):
        executor.run(print)


def test_elastic_settings_accept_older_names() -> None:
    from ringjax.ray import ElasticRayExecutor

    settings: Any = ElasticRayExecutor.create_settings(
        min_np=2, max_np=3, verbose=2, cooldown_range=(2, 5), ssh_port=22
    )
    assert (settings.min_num_proc, settings.max_num_proc) == (2, 3)
    assert (settings.verbose, settings.ssh_port) == (2, 22)
    params: Any = ElasticRayExecutor(settings)._executor.params
    assert (params.min_workers, params.max_workers) == (2, 3)
    assert params.cooldown_range == (2, 5)


def test_settings_objects_may_lack_attributes() -> None:
    from ringjax.ray.adapter import get_setting, settings_environment
    from ringjax.ray.utils import detect_nics, nics_to_env_var

    class Settings:
        timeout_s = 12
        nics = ("eth1", "eth0")

    assert get_setting(Settings(), "placement_group_timeout_s") == 100
    assert settings_environment(Settings()) == {
        "RINGJAX_START_TIMEOUT": "12",
        "RINGJAX_NETWORK_INTERFACES": "eth0,eth1",
    }
    assert nics_to_env_var(detect_nics(Settings())) == {
        "RINGJAX_NETWORK_INTERFACES": "eth0,eth1"
    }
    assert nics_to_env_var([]) == {}


def test_coordinator_derives_ranks_from_nodes() -> None:
    from ringjax.ray.runner import Coordinator, MiniSettings

    coordinator = Coordinator(MiniSettings(timeout_s=7))
    assert (coordinator.world_size, coordinator.node_id_string) == (0, "")
    for rank, node in enumerate("aabab"):
        coordinator.register(f"host-{node}", node, rank)
    assert (coordinator.world_size, coordinator.node_id_string) == (5, "a:3,b:2")
    assert coordinator.hostnames == {"host-a", "host-b"}
    found = coordinator.finalize_registration()
    local = [found[rank]["HOROVOD_LOCAL_RANK"] for rank in range(5)]
    cross = [found[rank]["HOROVOD_CROSS_SIZE"] for rank in range(5)]
    assert (local, cross) == ([0, 1, 0, 2, 1], [2, 2, 2, 1, 2])
    variables = coordinator.establish_rendezvous()
    try:
        assert variables["RINGJAX_START_TIMEOUT"] == "7"
        assert {"RINGJAX_RENDEZVOUS", "RINGJAX_SECRET"} < variables.keys()
    finally:
        coordinator.close()


def node(name: str, alive: bool = True, **has: float) -> dict[str, Any]:
    return {"NodeManagerAddress": name, "Resources": has, "alive": alive}


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({}, {"a": 8, "b": 4}),
        ({"cpus_per_slot": 3}, {"a": 2, "b": 1}),
        ({"use_gpu": True}, {"a": 2}),
        ({"use_gpu": True, "gpus_per_slot": 2}, {"a": 1}),
        ({"use_gpu": True, "gpus_per_slot": None}, {"a": 2}),
    ],
)
def test_discovery_counts_whole_workers(
    stub: Any, needs: dict[str, Any], expected: dict[str, int]
) -> None:
    from ringjax.ray.elastic import RayHostDiscovery
    from ringjax.runner.elastic.discovery import HostDiscovery

    nodes = [node("a", CPU=8.0, GPU=2.0), node("b", CPU=4.0), node("c", False, CPU=9.0)]
    stub.nodes = lambda: nodes
    discovery = RayHostDiscovery(**needs)
    assert isinstance(discovery, HostDiscovery)
    assert discovery.find_available_hosts_and_slots() == expected


def test_test_discovery_hides_hosts(stub: Any) -> None:
    from ringjax.ray.elastic import TestDiscovery

    stub.nodes = lambda: [node(name, CPU=1.0) for name in "abcd"]
    discovery = TestDiscovery(min_hosts=2, max_hosts=3, change_frequency_s=0)
    seen = [len(discovery.find_available_hosts_and_slots()) for _ in range(30)]
    assert set(seen[1:]) == {2, 3}


def test_only_a_dictionary_can_be_logged() -> None:
    from ringjax.ray import ray_logger

    class Queue(list[Any]):
        put = list.append

    queue = Queue()
    ray_logger.log({"step": 1})  # without a queue, so the message is dropped
    ray_logger.configure(queue)
    ray_logger.log({"step": 2})
    with pytest.raises(ValueError, match="expected a dict, not int"):
        ray_logger.log(3)
    assert queue == [{"step": 2}]


def test_an_unavailable_actor_is_a_failed_worker(stub: Any) -> None:
    """A lost node may still run, so its worker must not count as ended."""
    from ringjax.ray import actors

    class ActorUnavailableError(sys.modules["ray.exceptions"].RayError):  # type: ignore[name-defined,misc]
        def __str__(self) -> str:
            return "Unavailable:  x. Worker exit detail: gone. Some common causes"

    def get(_: object) -> None:
        raise ActorUnavailableError

    stub.get = get
    with EngineJob(1) as job:
        job.tickets(["a"])
        actors.record_outcome(job, 0, None)
        with pytest.raises(LaunchError, match=r"gone \(ActorUnavailableError: gone.\)"):
            job.results()


def test_pauses_grow_with_consecutive_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure causes no pause; later pauses double up to the limit."""
    from ringjax.ray import elastic_jobs

    monkeypatch.setattr(sys.modules["ray"], "put", lambda _: None)
    monkeypatch.setattr(elastic_jobs.actors, "kill_actors", lambda _: None)
    monkeypatch.setattr(elastic_jobs.time, "monotonic", lambda: 0.0)
    job = elastic_jobs.ElasticJob(print, {}, (1, 1), {}, 1.0, cooldown=(2, 7))
    pauses = []
    for _ in range(5):
        actor = elastic_jobs._Actor(None, None, "")
        job._actors.append(actor)
        job._remove(actor, early=True)
        pauses.append(job._pause_until)
    assert pauses == [0, 2, 4, 7, 7]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, 0),
        ({"ready": True}, 2),  # it has started well, and was killed later
        ({"rank": 0}, 2),
        ({"end_confirmed": False}, 2),  # its node cannot be reached
    ],
)
def test_three_spares_that_fail_in_a_row_are_enough(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    left: int,
) -> None:
    from ringjax.ray import elastic_jobs
    from ringjax.run.workers import Worker, WorkerSlot

    monkeypatch.setattr(sys.modules["ray"], "put", lambda _: None)
    job: Any = elastic_jobs.ElasticJob(print, {}, (1, 2), {}, 1.0, spares=2)
    engine: Any = SimpleNamespace(workers={}, members={0: 0})

    def fail(number: int, **given: Any) -> None:
        engine.workers[number] = Worker(number, WorkerSlot("a", 0, 0), **given)
        job._count_failed_spare(engine.workers[number], engine)

    for number in range(5):
        fail(number)  # a member is missing, so these are no spares
    engine.members = {0: 0, 9: 1}
    for number in (5, 6):
        fail(number)
    engine.workers[7] = Worker(7, WorkerSlot("a", 0, 0), ready=True)
    for number in (8, 10):
        fail(number)  # the failures before the spare that was ready do not count
    assert job.spares == 2
    fail(11, **given)
    assert job.spares == left
    assert ("no more spares are started: 3 in a row" in caplog.text) == (left == 0)


def test_free_slots_follow_from_resources(stub: Any) -> None:
    from ringjax.ray import actors

    stub.available_resources = lambda: {"CPU": 5.0, "host": 3.0}
    assert actors.count_free_slots({"CPU": 2.0, "GPU": 0.0}) == 2
    assert actors.count_free_slots({"CPU": 1.0, "host": 1.0}) == 3
    assert actors.count_free_slots({"GPU": 1.0}) == 0
