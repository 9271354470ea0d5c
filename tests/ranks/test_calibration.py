"""Calibration: ranks measure their links at the start and agree about the constants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launch import StartJob

import ringjax
from ringjax import _native, runtime
from ringjax.links import calibration, cost_cache

pytestmark = pytest.mark.launch("core")
DEFAULTS = _native.local_world([0])[0].cost
FAKE_COST = dict.fromkeys(cost_cache.NAMES, 3e-6)


@pytest.fixture(autouse=True)
def _shutdown_afterwards() -> Iterator[None]:
    yield
    # Tests of other files run in the same processes, with other host names.
    if "RINGJAX_RANK" in os.environ:
        ringjax.shutdown()


@pytest.fixture
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a cache folder for this test on this number of ranks."""
    name = f"{request.node.originalname}-{os.environ['RINGJAX_SIZE']}"
    path = Path(os.environ["XDG_CACHE_HOME"], name)
    monkeypatch.setenv("RINGJAX_CACHE_DIR", str(path))
    return path


def start(patch: pytest.MonkeyPatch, per_host: int = 1, **settings: str) -> Any:
    """Calls `init` again, with `per_host` ranks on each host, and returns the costs."""
    ringjax.shutdown()
    host = int(os.environ["RINGJAX_RANK"]) // per_host
    for name, value in {"hostname": f"host{host}", **settings}.items():
        patch.setenv(f"RINGJAX_{name.upper()}", value)
    ringjax.init()
    return runtime.communicator().cost


def of_all_ranks(value: Any) -> list[Any]:
    return runtime.current("test").exchange(value, "values of a test")


def total() -> float:
    x = np.full(5, 1.0)
    which = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"]
    runtime.communicator().execute(*which, [x], [x])
    return float(x[3])


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("per_host", [1, 2])
def test_all_ranks_use_the_same_constants(
    per_host: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = start(monkeypatch, per_host, shm="1" if per_host == 1 else "0")
    assert ringjax.stats()["calls"] == 0  # the calls of the calibration do not count
    assert of_all_ranks(cost) == [cost] * ringjax.size()
    assert cost_cache.is_valid(cost)
    where = "remote" if ringjax.size() > per_host else "local"
    measured = {f"{where}_latency", f"{where}_message", f"{where}_byte"}
    assert all(cost[name] != DEFAULTS[name] for name in measured)
    assert runtime.communicator().stats().keys() == {"transports"}
    assert total() == ringjax.size()
    some = ringjax.add_process_set([0, ringjax.size() - 1])
    if some.included():
        assert runtime.communicator(some).cost == cost


@pytest.mark.ranks(3)
def test_off_and_shared_memory_keep_the_defaults(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(monkeypatch, calibrate="off") == DEFAULTS
    assert start(monkeypatch, per_host=3, calibrate="always") == DEFAULTS
    assert not folder.exists()


@pytest.mark.ranks(2, 3)
def test_a_second_start_reads_the_cached_constants(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_fake_cost() -> None:
        """Lets rank 0 write another cost into the file, while no rank reads it."""
        of_all_ranks("before")
        if ringjax.rank() == 0:
            world = runtime.current("test")
            assert world.client is not None
            network = calibration.describe_network(world.members, world.client.hello)
            assert cost_cache.read(str(folder), network) is not None
            assert cost_cache.write(str(folder), network, FAKE_COST)
        of_all_ranks("after")

    first = start(monkeypatch)
    assert start(monkeypatch) == first
    write_fake_cost()
    assert start(monkeypatch) == FAKE_COST
    assert start(monkeypatch, calibrate="always") != FAKE_COST
    monkeypatch.setenv("RINGJAX_CALIBRATE", "auto")
    write_fake_cost()
    assert start(monkeypatch, tcp_streams="1") != FAKE_COST  # the key differs
    assert start(monkeypatch, tcp_streams="2") == FAKE_COST


@pytest.mark.ranks(2)
def test_a_damaged_file_is_measured_anew_and_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch)
    of_all_ranks("written")
    if ringjax.rank() == 0:
        [path] = folder.iterdir()
        path.write_text('{"when": "nonsense"')
    of_all_ranks("damaged")
    cost = start(monkeypatch)
    assert of_all_ranks(cost) == [cost] * 2
    assert start(monkeypatch) == cost


@pytest.mark.ranks(2)
def test_only_rank_0_needs_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither folder can be created.
    name = "no" if os.environ["RINGJAX_RANK"] == "0" else "yes"
    monkeypatch.setenv("RINGJAX_CACHE_DIR", f"/proc/self/{name}")
    cost = start(monkeypatch)
    assert cost["remote_byte"] != DEFAULTS["remote_byte"]
    assert of_all_ranks(cost) == [cost] * 2


@pytest.mark.ranks(2)
def test_a_forced_algorithm_stays_forced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, algorithm="allreduce:double_tree")
    assert total() == 2
    stats = runtime.communicator().stats()["allreduce"]
    assert stats["algorithms"] == {"double_tree": 1}


@pytest.mark.ranks(3)
def test_newcomers_use_the_constants_of_the_members(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = (int(os.environ["RINGJAX_RANK"]) + 1) // 2
    start(monkeypatch, hostname=f"host{host}", shm="0", calibrate="off")
    world = runtime.communicator()
    known = DEFAULTS | {"local_latency": 1e-2}

    def choice(cost: dict[str, float]) -> str:
        seconds = _native.predict("broadcast", 8, world.hosts, cost)
        return min(seconds, key=lambda item: item[1])[0]

    assert choice(known) != choice(DEFAULTS)
    newcomer = ringjax.rank() == 2
    world.set_cost({} if newcomer else known)
    before = {} if newcomer else known
    cost, how = calibration.calibrate(world, runtime.config(), "a network", before)
    assert how == "remembered"
    assert of_all_ranks(cost) == [known] * 3
    assert total() == 3


SCRIPT = """
import os, signal, sys, time
# ringrun sends SIGTERM a second after a loss. On a busy machine a rank may not have
# printed its error by then.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ["RINGJAX_HOSTNAME"] = "host" + os.environ["RINGJAX_RANK"]
import ringjax
from ringjax.errors import RingjaxError
from ringjax.links import calibration
from support import numpy_only

def fail(probe):
    {failure}

if os.environ["RINGJAX_RANK"] == "1":
    calibration._time_short_calls = fail
try:
    ringjax.init()
except RingjaxError as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    time.sleep(2)  # until all ranks have printed the error
    sys.exit(4)
"""


def test_a_rank_killed_during_calibration_is_named(start_job: StartJob) -> None:
    job = start_job(3, SCRIPT.format(failure="os._exit(3)"))
    assert job.wait() != 0
    for rank in (0, 2):
        assert "PeerLost: " in job.output(rank)
        assert "rank 1" in job.output(rank)


def test_a_rank_frozen_during_calibration_is_a_timeout(start_job: StartJob) -> None:
    env = {"RINGJAX_START_TIMEOUT": "5"}
    job = start_job(3, SCRIPT.format(failure="time.sleep(60)"), env)
    assert job.wait() != 0
    output = job.output(0) + job.output(2)
    assert "the links could not be measured within 5 s" in output
