"""Tests of device communicators without a device: NCCL's file, agreement, refusals.

A fake of the native core records its calls. tests/ranks runs collectives over a stub of
NCCL, and tests/gpu over the real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import ringjax
from ringjax import _native, runtime
from ringjax.config import Config
from ringjax.errors import Mismatch, RingjaxError, StartupError
from ringjax.world import communicator_ids, devices
from ringjax.world.rank_info import RankInfo
from ringjax.xla import placement

VERSION = 22809


class FakeStatusError(_native.StatusError):
    """An error of the native core."""

    def __init__(self, text: str, code: str = "FAILED_PRECONDITION") -> None:
        super().__init__(text)
        self.code, self.rank = code, -1


class FakeCore:
    """A fake of the native core that can load `files` as NCCL. Records its calls."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files, self.calls, self.failing = files, [], ""
        self.calls: list[tuple[Any, ...]]

    def open_nccl(self, path: str = "") -> tuple[int, str]:
        self.calls.append(("open", path))
        if path not in self.files:
            raise FakeStatusError(f"no NCCL: {path or 'libnccl.so.2'}: cannot open")
        return VERSION, self.files[path]

    def nccl_unique_id(self) -> bytes:
        self.calls.append(("id",))
        return bytes(128)

    def connect(self, **arguments: Any) -> list[Any]:
        if self.failing:
            raise FakeStatusError(self.failing, "UNAVAILABLE")
        self.calls.append(("make", arguments["id"]))
        core = self

        class FakeCommunicator:
            options = arguments

            def close(self) -> None:
                core.calls.append(("close", arguments["id"]))

            def abort(self, text: str, rank: int) -> None:
                core.calls.append(("abort", arguments["id"], text, rank))

        return [FakeCommunicator() for _ in arguments["devices"]]


class FakeWorld:
    """A fake world of rank 0. `others` computes what the other ranks exchange."""

    rank = 0

    def __init__(self, core: FakeCore, size: int = 2, **settings: Any) -> None:
        self.core, self.size, self.config = core, size, Config(**settings)
        self.rank_info = RankInfo.from_hosts(0, ["here"] * size)
        self.others: Callable[[int, Any], Any] = lambda rank, value: value
        self.lost: dict[int, str] = {}
        self.lines: list[str] = []

    def exchange(self, value: Any, what: str) -> list[Any]:
        del what
        return [value, *(self.others(r, value) for r in range(1, self.size))]

    def connect_control(self, number: int, ranks: Sequence[int], name: str) -> Any:
        self.core.calls.append(("connect", number, list(ranks), name))
        return object()

    def disconnect(self, number: int) -> None:
        self.core.calls.append(("disconnect", number))

    def departed_ranks(self) -> dict[int, str]:
        return self.lost

    def log(self, level: str, text: str) -> None:
        self.lines.append(f"{level}: {text}")


def devices_of(world: FakeWorld, counts: Sequence[int] = (1, 1)) -> devices.Devices:
    return devices.Devices(world.config, counts, world)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    fake = FakeCore({"": "/usr/lib/libnccl.so.2"})
    monkeypatch.setattr(_native, "open_nccl", fake.open_nccl)
    monkeypatch.setattr(_native, "nccl_unique_id", fake.nccl_unique_id)
    monkeypatch.setattr(_native, "connect_devices", fake.connect)
    monkeypatch.setattr(devices, "wheel_library", lambda: None)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "0")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    return fake


# -- the search ------------------------------------------------------------------------


def test_the_setting_replaces_the_search(core: FakeCore) -> None:
    core.files["/opt/libnccl.so.2"] = "/opt/libnccl.so.2"
    assert devices.open_library("/opt/libnccl.so.2") == (VERSION, "/opt/libnccl.so.2")
    with pytest.raises(RingjaxError, match=r"no NCCL: /gone/libnccl\.so\.2: cannot"):
        devices.open_library("/gone/libnccl.so.2")
    asked = [("open", "/opt/libnccl.so.2"), ("open", "/gone/libnccl.so.2")]
    assert core.calls == asked


def test_the_wheels_nccl_precedes_the_systems(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "wheel_library", lambda: "/wheel/libnccl.so.2")
    assert devices.open_library("")[1] == "/usr/lib/libnccl.so.2"
    assert core.calls == [("open", "/wheel/libnccl.so.2"), ("open", "")]
    core.files["/wheel/libnccl.so.2"] = "/wheel/libnccl.so.2"
    assert devices.open_library("")[1] == "/wheel/libnccl.so.2"
    core.files.clear()
    with pytest.raises(RingjaxError, match="/wheel/"):  # names the file in the wheel
        devices.open_library("")


def test_the_wheel_is_a_namespace_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    assert devices.wheel_library() != str(tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    (tmp_path / "nvidia/nccl/lib/libnccl.so.2").touch()
    assert devices.wheel_library() == str(tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    monkeypatch.undo()
    sys.modules.pop("nvidia", None)


def test_an_explicit_launch_order_is_kept(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.open_library("")
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0"
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    devices.open_library("")
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


@pytest.mark.parametrize(("driver", "order"), [(0, "1"), (12020, "0"), (12030, "1")])
def test_implicit_launch_order_depends_on_the_driver(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch, driver: int, order: str
) -> None:
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.delenv(name, raising=False)
    found = devices.information() | {"driver": driver}
    monkeypatch.setattr(_native, "cuda_info", lambda: found)
    devices.open_library("")
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == order
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"


def test_version_text() -> None:
    assert devices.version_text(VERSION) == "2.28.9"
    assert devices.version_text(22304) == "2.23.4"


# -- connecting ------------------------------------------------------------------------


def test_each_process_set_of_this_rank_gets_a_communicator(core: FakeCore) -> None:
    world = FakeWorld(core, fusion="pack", fusion_small=7, comm_stream=False)
    both = devices_of(world)
    assert both.problem(0) == "it was not built"
    both.open([3], "", {0: [0, 1], 2: [1], 1: [0]})
    made = [call for call in core.calls if call[0] in ("connect", "make")]
    assert made == [
        ("connect", 0 | communicator_ids.DEVICE_CONTROL, [0, 1], "world (device)"),
        ("make", 0),
        ("connect", 1 | communicator_ids.DEVICE_CONTROL, [0], "process set 1 (device)"),
        ("make", 1),
    ]
    assert core.calls.count(("id",)) == 2  # rank 1 makes the ID of set 2
    (first,) = both.communicators[0]
    options = cast(Any, first).options
    assert (options["devices"], options["unique_ids"]) == ((3,), [bytes(128)])
    assert options["options"] == {
        "start_timeout": 120.0,
        "fusion": "pack",
        "fusion_small": 7,
        "comm_stream": 0,
    }
    assert (both.problem(0), both.problem(1)) == ("", "")
    before = len(core.calls)
    both.open([3], "", {0: [0, 1]})  # only the first call acts
    assert len(core.calls) == before


def test_closing_and_aborting_communicators(core: FakeCore) -> None:
    both = devices_of(FakeWorld(core))
    both.open([0], "", {0: [0, 1], 1: [0]})
    core.calls.clear()
    both.remove(1)
    both.remove(1)
    assert core.calls == [
        ("close", 1),
        ("disconnect", 1 | communicator_ids.DEVICE_CONTROL),
    ]
    both.stop("rank 0 fails", 0)
    both.close()
    assert core.calls[2:] == [("abort", 0, "rank 0 fails", 0), ("close", 0)]
    assert both.communicators == {}


def test_ranks_with_different_nccls_refuse_each_other(core: FakeCore) -> None:
    world = FakeWorld(core, size=4)
    odd = {"nccl": 22703, "path": "/other/libnccl.so.2"}
    world.others = lambda rank, value: value | (odd if rank in (1, 3) else {})
    four = devices_of(world, [1] * 4)
    with pytest.raises(StartupError) as error:
        four.open([0], "", {0: [0, 1, 2, 3]})
    assert "ranks 0, 2: 2.28.9 (/usr/lib/libnccl.so.2)" in str(error.value)
    assert "ranks 1, 3: 2.27.3 (/other/libnccl.so.2)" in str(error.value)
    assert "RINGJAX_NCCL" in four.problem(0)


@pytest.mark.parametrize("setting", ["fusion", "fusion_small"])
def test_ranks_with_different_fusion_refuse_each_other(
    core: FakeCore, setting: str
) -> None:
    world = FakeWorld(core)
    world.others = lambda rank, value: (
        value | {"settings": value["settings"] | {setting: 5}}
    )
    with pytest.raises(StartupError, match=f"RINGJAX_{setting.upper()} must be alike"):
        devices_of(world).open([0], "", {0: [0, 1]})


def test_ranks_with_and_without_device_code_refuse_each_other(core: FakeCore) -> None:
    world = FakeWorld(core, 3)
    mine = devices.information()["device_code"] != "none"
    world.others = lambda rank, value: value | {"packs": mine != (rank == 2)}
    with pytest.raises(StartupError, match="same build of ringjax, but rank"):
        devices_of(world).open([0], "", {0: [0, 1, 2]})


def test_a_warning_if_jax_leaves_nccl_no_memory(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned(**variables: str) -> bool:
        for name in ("FRACTION", "PREALLOCATE"):
            full = f"XLA_PYTHON_CLIENT_{'MEM_' * (name == 'FRACTION')}{name}"
            monkeypatch.delenv(full, raising=False)
            if name in variables:
                monkeypatch.setenv(full, variables[name])
        world = FakeWorld(core)
        devices_of(world).open([0], "", {0: [0, 1]})
        return any("of the GPU's memory" in line for line in world.lines)

    assert warned(FRACTION=".95")
    assert warned(FRACTION="0.9")
    assert not warned()
    assert not warned(FRACTION="0.85")
    assert not warned(FRACTION="much")
    assert not warned(FRACTION=".95", PREALLOCATE="false")


def test_two_ranks_on_one_gpu_are_an_error(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = devices.information() | {"devices": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}
    monkeypatch.setattr(_native, "cuda_info", lambda: found)
    world = FakeWorld(core, 3)
    world.others = lambda rank, value: value | ({"gpu": "GPU-c"} if rank == 1 else {})
    with pytest.raises(StartupError, match=r"rank 0 and rank 2 .* same GPU, GPU-b; "):
        devices_of(world, [2] * 3).open([1], "", {0: [0, 1, 2]})
    # GPUs of two hosts are different GPUs, even if both report the same UUID.
    world.rank_info = RankInfo.from_hosts(0, ["here", "here", "there"])
    devices_of(world, [2] * 3).open([1], "", {0: [0, 1, 2]})
    assert core.calls.count(("make", 0)) == 1
    # Ranks may share a GPU if NCCL_HOSTID is set, with which NCCL allows it.
    world.rank_info = RankInfo.from_hosts(0, ["here"] * 3)
    monkeypatch.setenv("NCCL_HOSTID", "test-0")
    devices_of(world, [2] * 3).open([1], "", {0: [0, 1, 2]})
    assert core.calls.count(("make", 0)) == 2


@pytest.mark.parametrize("required", [0, 1])
def test_required_tls_disables_nccl_between_hosts(
    core: FakeCore, required: int
) -> None:
    world = FakeWorld(core, tls=["required", "auto"][required])
    world.others = lambda rank, value: value | {"tls": ["auto", "required"][required]}
    devices_of(world).open([0], "", {0: (0, 1)})  # the traffic stays on this host
    assert ("make", 0) in core.calls
    world.rank_info = RankInfo.from_hosts(0, ["here", "there"])
    found = devices_of(world)
    found.open([0], "", {0: (0, 1)})
    assert "NCCL does not encrypt what goes from host to host" in found.problem(0)


def test_a_peer_without_a_device_disables_nccl(core: FakeCore) -> None:
    world = FakeWorld(core)
    world.others = lambda rank, value: value | {"device": "JAX computes on cpu"}
    both = devices_of(world)
    both.open([0], "", {0: [0, 1]})
    assert both.problem(0) == "rank 1 has no CUDA device: JAX computes on cpu"
    assert both.communicators == {}
    assert world.lines[-1].startswith("info: no CUDA collectives in jit: rank 1 has")
    assert not [call for call in core.calls if call[0] in ("connect", "make", "id")]


def test_a_rank_without_a_device_opens_no_nccl(core: FakeCore) -> None:
    both = devices_of(FakeWorld(core))
    both.open([], "RINGJAX_GPU is 0", {0: [0, 1]})
    assert both.problem(0) == "rank 0 has no CUDA device: RINGJAX_GPU is 0"
    assert core.calls == []


def test_a_missing_nccl_disables_device_communicators(core: FakeCore) -> None:
    core.files.clear()
    both = devices_of(FakeWorld(core))
    both.open([0], "", {0: [0, 1]})
    assert "libnccl.so.2: cannot open" in both.problem(0)


def test_no_rank_has_a_device(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"devices": [], "driver_error": "libcuda.so.1: cannot open"}
    monkeypatch.setattr(_native, "cuda_info", lambda: found)
    none = devices_of(FakeWorld(core), [0, 0])
    assert not none.possible
    expected = "no rank has a CUDA device: libcuda.so.1: cannot open"
    assert none.problem(0) == expected
    assert devices.count(Config()) == 0
    found["devices"] = [{"name": "H200"}]
    assert (devices.count(Config()), devices.absence(Config())) == (1, "")
    assert devices.count(Config(gpu=False)) == 0
    assert devices.absence(Config(gpu=False)) == "RINGJAX_GPU is 0"


def test_an_nccl_error_names_departed_ranks(core: FakeCore) -> None:
    world = FakeWorld(core)
    world.lost, core.failing = {1: "was killed", 7: "left"}, "ncclCommInitRank: broken"
    both = devices_of(world)
    with pytest.raises(StartupError) as error:
        both.open([2], "", {0: [0, 1]})
    text = str(error.value)
    assert "rank 0, device 2: ncclCommInitRank: broken; rank 1 was killed" in text
    assert "rank 7" not in text
    assert ("disconnect", communicator_ids.DEVICE_CONTROL) in core.calls
    assert both.problem(0) == text


def test_an_error_of_a_sets_first_rank_is_raised(core: FakeCore) -> None:
    world = FakeWorld(core)
    world.others = lambda rank, value: (
        value | ({} if "device" in value else {"error": "no interface"})
    )
    with pytest.raises(
        StartupError, match="process set 1 has no .*rank 1: no interface"
    ):
        devices_of(world).open([0], "", {1: [1]})


def test_different_calls_raise_mismatch(core: FakeCore) -> None:
    world = FakeWorld(core)
    world.others = lambda rank, value: "add_process_set 1 [0] 0123"
    with pytest.raises(Mismatch, match="rank 1 calls add_process_set 1"):
        devices_of(world).open([0], "", {0: [0, 1]})


def test_a_warning_if_another_nccl_is_loaded(core: FakeCore) -> None:
    core.files["/mine/libnccl.so.2"] = "/jax/libnccl.so.2"  # already loaded
    world = FakeWorld(core, nccl="/mine/libnccl.so.2")
    devices_of(world).open([0], "", {0: [0, 1]})
    assert any("RINGJAX_NCCL is not used: /jax/" in line for line in world.lines)


# -- init and answers -----------------------------------------------------------------


def test_every_init_creates_new_communicators(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"devices": [{"name": "H200"}], "driver_error": "", "device_code": "none"}
    monkeypatch.setattr(_native, "cuda_info", lambda: found)
    monkeypatch.setattr(placement, "cuda_devices", lambda each: ([0], ""))
    for _ in range(2):
        ringjax.init()
        try:
            expected = {0, communicator_ids.EAGER_LANE, communicator_ids.DEVICE_CONTROL}
            assert set(runtime.current("test").epoch.communicators) == expected
            two = ringjax.add_process_set([0])  # equal to the world: nothing new
            assert two.process_set_id == 0
        finally:
            ringjax.shutdown()
    assert [call[0] for call in core.calls] == ["open", "id", "make", "close"] * 2


def test_build_info(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"device_code": "nvcc 13.0", "driver": 0, "nccl": 0, "nccl_path": ""}
    monkeypatch.setattr(_native, "cuda_info", lambda: dict(found))
    monkeypatch.delenv("RINGJAX_NCCL", raising=False)
    assert ringjax.nccl_built() == VERSION
    assert ringjax.cuda_built() is True
    info = ringjax.build_info()
    assert (info["nccl"], info["nccl_path"]) == (VERSION, "/usr/lib/libnccl.so.2")
    assert (info["ringjax"], info["nccl_error"]) == (ringjax.__version__, "")
    core.files.clear()
    found["device_code"] = "none"
    assert (ringjax.nccl_built(), ringjax.cuda_built()) == (0, False)
    assert "cannot open" in ringjax.build_info()["nccl_error"]
