"""Tests of several CUDA devices per rank with fakes: numbers, names, refused counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.ringrun import ringrun

from ringjax import _native
from ringjax.config import Config
from ringjax.errors import PeerLost, Stalled, StartupError
from ringjax.run import options
from ringjax.world import communicator_ids, devices, epoch_devices
from ringjax.world.rank_info import RankInfo
from ringjax.xla import placement


class FakeWorld:
    """A fake world of two ranks on two hosts, seen from rank 0."""

    rank = 0

    def __init__(self, **settings: Any) -> None:
        self.config = Config(**settings)
        self.rank_info = RankInfo.from_hosts(0, ["here", "there"])
        self.others: Callable[[Any], Any] = lambda value: value
        self.controls: list[tuple[int, str]] = []
        # Errors of connect_control, by the end of the communicator's name.
        self.fails: dict[str, BaseException] = {}
        self.logged: list[tuple[str, str]] = []

    def exchange(self, value: Any, what: str) -> list[Any]:
        del what
        return [value, self.others(value)]

    def connect_control(self, number: int, ranks: Sequence[int], name: str) -> Any:
        del ranks
        for end, error in self.fails.items():
            if name.endswith(end):
                raise error
        self.controls.append((number, name))
        return object()

    def disconnect(self, number: int) -> None:
        self.controls = [x for x in self.controls if x[0] != number]

    def departed_ranks(self) -> dict[int, str]:
        return {}

    def log(self, level: str, text: str) -> None:
        self.logged.append((level, text))


class FakeCommunicator:
    """A fake communicator of one device."""

    def __init__(self, log: list[str], device: int) -> None:
        self.log, self.device = log, device

    def close(self) -> None:
        self.log.append(f"close {self.device}")

    def abort(self, text: str, rank: int) -> None:
        self.log.append(f"abort {self.device}: {text} {rank}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the native core, and records its calls."""
    asked: list[str] = []
    ids = iter(range(100))

    def connect(**given: Any) -> list[FakeCommunicator]:
        assert len(given["controls"]) == len(given["devices"])
        asked.append(f"connect {[i[0] for i in given['unique_ids']]}")
        return [FakeCommunicator(asked, device) for device in given["devices"]]

    monkeypatch.setattr(_native, "open_nccl", lambda path="": (22809, "/nccl"))
    monkeypatch.setattr(_native, "nccl_unique_id", lambda: bytes([next(ids)] * 128))
    monkeypatch.setattr(_native, "connect_devices", connect)
    return asked


def make_devices(world: FakeWorld) -> devices.Devices:
    return devices.Devices(world.config, (4, 4), world)


def test_each_device_has_its_own_control_communicator_and_nccl_id(
    log: list[str],
) -> None:
    world = FakeWorld(devices_per_rank=2)
    both = make_devices(world)
    both.open([2, 3], "", {0: [0, 1], 1: [0]})
    names = ["world (device 0)", "world (device 1)"]
    names += ["process set 1 (device 0)", "process set 1 (device 1)"]
    assert [name for _, name in world.controls] == names
    assert len({number for number, _ in world.controls}) == 4
    assert log == ["connect [0, 1]", "connect [2, 3]"]
    assert [c.device for c in both.communicators[0]] == [2, 3]
    both.stop("over", 0)
    assert log[2:] == ["abort 2: over 0", "abort 3: over 0"] * 2
    both.remove(1)
    assert [name for _, name in world.controls] == names[:2]
    both.close()
    assert log[-2:] == ["close 2", "close 3"]


def test_a_single_device_has_no_number_in_its_name(log: list[str]) -> None:
    world = FakeWorld()
    make_devices(world).open([3], "", {0: [0, 1]})
    assert world.controls == [(communicator_ids.DEVICE_CONTROL, "world (device)")]
    assert log == ["connect [0]"]


def test_control_ids_differ() -> None:
    numbers = [0, 1, 7, communicator_ids.REPLICA_SET]
    found = {
        communicator_ids.control_id(n, i): (n, i) for n in numbers for i in range(16)
    }
    assert len(found) == 64
    for number, (own, place) in found.items():
        assert number < 1 << 31  # the limit of the core
        assert (
            communicator_ids.process_set_of(number),
            communicator_ids.device_index_of(number),
        ) == (own, place)
    for number in numbers:
        assert (
            communicator_ids.process_set_of(number | communicator_ids.EAGER_LANE)
            == number
        )
        assert (
            communicator_ids.device_index_of(number | communicator_ids.EAGER_LANE) == 0
        )


@pytest.mark.parametrize("error", [PeerLost("lost"), KeyboardInterrupt()])
def test_control_communicators_are_removed_if_the_next_one_fails(
    log: list[str], error: BaseException
) -> None:
    """After a failure, the process set can be added again."""
    world = FakeWorld(devices_per_rank=2)
    both = make_devices(world)
    both.open([0, 1], "", {0: [0, 1]})
    world.fails["1 (device 1)"] = error
    with pytest.raises(type(error)):
        both.add(1, [0, 1])
    assert [number for number, _ in world.controls] == [
        communicator_ids.control_id(0, 0),
        communicator_ids.control_id(0, 1),
    ]
    world.fails.clear()
    both.add(1, [0, 1])
    assert len(both.communicators[1]) == 2


@pytest.mark.parametrize(("wanted", "level"), [(1, "info"), (2, "warning")])
def test_missing_devices_are_logged(log: list[str], wanted: int, level: str) -> None:
    world = FakeWorld(devices_per_rank=wanted)
    both = make_devices(world)
    both.open((), "JAX computes on cpu", {0: [0, 1]})
    ((how, text),) = world.logged
    assert (how, log) == (level, [])
    assert text.endswith("rank 0 has no CUDA device: JAX computes on cpu")
    assert "--group-size" in both.problem(communicator_ids.REPLICA_SET)


@pytest.mark.parametrize(
    ("wanted", "other", "text"),
    [
        (0, {"device": [5]}, "rank 0 has 2 (0, 1) and rank 1 has 1 (5)"),
        (2, {"wanted": 4}, "is 4 on rank 1, which computes on 2 (0, 1)"),
        (4, {}, "is 4 on rank 0, which computes on 2 (0, 1)"),
    ],
)
def test_different_numbers_of_devices_are_refused(
    log: list[str], wanted: int, other: dict[str, Any], text: str
) -> None:
    world = FakeWorld(devices_per_rank=wanted)
    world.others = lambda value: value | other
    with pytest.raises(StartupError) as error:
        make_devices(world).open([0, 1], "", {0: [0, 1]})
    assert text in str(error.value)
    assert error.value.rank == (1 if other else 0)
    assert log == []


@pytest.mark.parametrize(("blamed", "seconds"), [(-1, 1), (0, 1), (1, 7)])
def test_a_rank_waits_for_the_exit_of_a_refused_rank(
    blamed: int, seconds: float
) -> None:
    world: Any = FakeWorld(failure_timeout=7.0)
    error = StartupError("does not fit")
    error.rank = blamed
    assert epoch_devices._seconds_until_over(world, world, error) == seconds


def test_ranks_that_do_not_take_part_are_suspected() -> None:
    accused: list[tuple[int, int, str]] = []

    def exchange(*_: object) -> list[Any]:
        raise Stalled("NCCL: ranks 1, 3 did not take part", [1, 3])

    line = SimpleNamespace(
        exchange=exchange, suspect=lambda *said: accused.append(said)
    )
    world: Any = SimpleNamespace(
        client=line, config=FakeWorld(start_timeout=7.0).config, log=None
    )
    epoch: Any = SimpleNamespace(rank_info=None, number=4)
    with pytest.raises(Stalled):
        epoch_devices.EpochControlPlane(world, epoch).exchange("mine", "NCCL")
    text = "did not take part within 7 s"
    assert accused == [(4, 1, text), (4, 3, text)]


def test_two_ranks_that_share_one_of_their_devices(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    world = FakeWorld(devices_per_rank=2)
    world.rank_info = RankInfo.from_hosts(0, ["here", "here"])
    world.others = lambda value: value | {"gpu": ["GPU-c", "GPU-b"]}
    shown = [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]
    found = devices.information() | {"devices": shown}
    monkeypatch.setattr(_native, "cuda_info", lambda: found)
    with pytest.raises(StartupError, match="rank 0 and rank 1 .* same GPU, GPU-b") as e:
        make_devices(world).open([0, 1], "", {0: [0, 1]})
    assert "has GPUs for, 2 each (RINGJAX_DEVICES_PER_RANK)" in str(e.value)
    assert log == []


class Device:
    """The attributes of a JAX device that ringjax reads."""

    platform = "gpu"
    client = type("Client", (), {"platform_version": "cuda 13000"})

    def __init__(self, number: int) -> None:
        self.local_hardware_id = number


def test_devices_are_those_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.jax, "default_backend", lambda: "gpu")
    seen = [Device(3), Device(1)]
    monkeypatch.setattr(placement.jax, "local_devices", lambda backend: seen)
    before = placement.jax.config.values["jax_platforms"]
    try:
        placement.jax.config.update("jax_platforms", "")
        assert placement.cuda_devices(1) == ((3,), "")
        for each in (0, 2):
            assert placement.cuda_devices(each) == ([1, 3], "")
    finally:
        placement.jax.config.update("jax_platforms", before)


def test_devices_per_rank_option_of_ringrun() -> None:
    parser = options.build_parser("0")
    for text in ("all", "4"):
        args = parser.parse_args(["-np", "2", "--devices-per-rank", text, "true"])
        found = options.environment(args)
        assert found["RINGJAX_DEVICES_PER_RANK"] == text
    assert Config.from_env(found).devices_per_rank == 4
    assert Config.from_env({"RINGJAX_DEVICES_PER_RANK": "ALL"}).devices_per_rank == 0
    args = parser.parse_args(["-np", "2", "true"])
    assert "RINGJAX_DEVICES_PER_RANK" not in options.environment(args)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", "an integer between 1 and 16"), ("some", "an integer"), ("1.5", "an")],
)
def test_bad_numbers_of_devices_are_refused(text: str, expected: str) -> None:
    done = ringrun("-np", "1", "--devices-per-rank", text, "true")
    assert done.returncode == 2
    assert "RINGJAX_DEVICES_PER_RANK" in done.stderr
    assert f"expected all, or {expected}" in done.stderr
