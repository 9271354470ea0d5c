"""The links are measured when a job starts, and all ranks take the same numbers."""

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
MARK = dict.fromkeys(cost_cache.NAMES, 3e-6)


@pytest.fixture(autouse=True)
def _other_hosts_afterwards() -> Iterator[None]:
    yield
    if "RINGJAX_RANK" in os.environ:  # other files share the launch
        ringjax.shutdown()


@pytest.fixture
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test on this number of ranks."""
    name = f"{request.node.originalname}-{os.environ['RINGJAX_SIZE']}"
    path = Path(os.environ["XDG_CACHE_HOME"], name)
    monkeypatch.setenv("RINGJAX_CACHE_DIR", str(path))
    return path


def start(patch: pytest.MonkeyPatch, per_host: int = 1, **settings: str) -> Any:
    """Starts again, with so many ranks on each host; the constants then."""
    ringjax.shutdown()
    host = int(os.environ["RINGJAX_RANK"]) // per_host
    for name, value in {"hostname": f"host{host}", **settings}.items():
        patch.setenv(f"RINGJAX_{name.upper()}", value)
    ringjax.init()
    return runtime.communicator().cost


def said_by_all(value: Any) -> list[Any]:
    return runtime.current("test").exchange(value, "what the ranks found")


def total() -> float:
    x = np.full(5, 1.0)
    which = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"]
    runtime.communicator().execute(*which, [x], [x])
    return float(x[3])


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("per_host", [1, 2])
def test_all_ranks_take_the_same_constants(
    per_host: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = start(monkeypatch, per_host, shm="1" if per_host == 1 else "0")
    assert ringjax.stats()["calls"] == 0  # but its own calls do not count
    assert said_by_all(cost) == [cost] * ringjax.size()
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
def test_a_second_start_reads_what_the_first_one_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark() -> None:
        """Another cost into the file, by rank 0, while nobody reads."""
        said_by_all("before")
        if ringjax.rank() == 0:
            world = runtime.current("test")
            network = calibration.describe_network(world.members, world.rank_info.hosts)
            assert cost_cache.read(str(folder), network) is not None
            assert cost_cache.write(str(folder), network, MARK)
        said_by_all("after")

    first = start(monkeypatch)
    assert start(monkeypatch) == first
    mark()
    assert start(monkeypatch) == MARK
    assert start(monkeypatch, calibrate="always") != MARK
    monkeypatch.setenv("RINGJAX_CALIBRATE", "auto")
    mark()
    assert start(monkeypatch, tcp_streams="1") != MARK  # another network
    assert start(monkeypatch, tcp_streams="2") == MARK


@pytest.mark.ranks(2)
def test_a_damaged_file_is_measured_anew_and_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch)
    said_by_all("written")
    if ringjax.rank() == 0:
        [path] = folder.iterdir()
        path.write_text('{"when": "nonsense"')
    said_by_all("damaged")
    cost = start(monkeypatch)
    assert said_by_all(cost) == [cost] * 2
    assert start(monkeypatch) == cost


@pytest.mark.ranks(2)
def test_only_rank_0_needs_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/proc/self/no" if os.environ["RINGJAX_RANK"] == "0" else "/proc/self/yes"
    monkeypatch.setenv("RINGJAX_CACHE_DIR", place)
    cost = start(monkeypatch)
    assert cost["remote_byte"] != DEFAULTS["remote_byte"]
    assert said_by_all(cost) == [cost] * 2


@pytest.mark.ranks(2)
def test_a_forced_algorithm_stays_forced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, algorithm="allreduce:double_tree")
    assert total() == 2
    stats = runtime.communicator().stats()["allreduce"]
    assert stats["algorithms"] == {"double_tree": 1}


@pytest.mark.ranks(3)
def test_members_of_an_elastic_job_know_constants_that_newcomers_do_not(
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
    assert said_by_all(cost) == [known] * 3
    assert total() == 3


SCRIPT = """
import os, signal, sys, time
# ringrun asks all to end a second after a loss; a busy one may be about to tell of it.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ["RINGJAX_HOSTNAME"] = "host" + os.environ["RINGJAX_RANK"]
import ringjax
from ringjax.errors import RingjaxError
from ringjax.links import calibration
from support import numpy_only

def strike(probe):
    {strike}

if os.environ["RINGJAX_RANK"] == "1":
    calibration._time_short_calls = strike
try:
    ringjax.init()
except RingjaxError as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    time.sleep(2)  # so that all of them have said it
    sys.exit(4)
"""


def test_a_rank_that_dies_meanwhile_is_named(start_job: StartJob) -> None:
    job = start_job(3, SCRIPT.format(strike="os._exit(3)"))
    assert job.wait() != 0
    for rank in (0, 2):
        assert "PeerLost: " in job.output(rank)
        assert "rank 1" in job.output(rank)


def test_a_rank_that_freezes_meanwhile_is_an_error_in_time(start_job: StartJob) -> None:
    env = {"RINGJAX_START_TIMEOUT": "5"}
    job = start_job(3, SCRIPT.format(strike="time.sleep(60)"), env)
    assert job.wait() != 0
    said = job.output(0) + job.output(2)
    assert "the links could not be measured within 5 s" in said
