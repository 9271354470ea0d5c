"""Tests of the placement of ranks on devices: shares, visible devices, JAX's devices.

The tests replace JAX's functions that list GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import pytest
from support.launch import environment

import ringjax
from ringjax import runtime
from ringjax.config import Config
from ringjax.world import devices
from ringjax.xla import placement


def test_device_shares_with_one_device_per_rank() -> None:
    assert [devices.share(rank, 6, 4) for rank in range(6)] == [
        (0,), (1,), (2,), (3,), (0,), (1,),
    ]  # fmt: skip
    assert devices.share(0, 1, 8) is None  # a single rank leaves the choice to JAX
    assert devices.share(1, 2, 1) is None  # there is only one device


def test_device_shares_with_several_devices_per_rank() -> None:
    assert [devices.share(rank, 2, 4, 2) for rank in range(2)] == [(0, 1), (2, 3)]
    assert devices.share(0, 1, 4, 2) == (0, 1)  # a single rank wants two of four
    assert devices.share(1, 2, 4, 4) is None  # each rank sees as many as it wants
    assert devices.share(1, 2, 2, 4) is None  # init refuses too few devices later
    assert devices.share(1, 2, 8, devices.ALL) is None
    # Too many ranks wrap around, and init then reports that they share a GPU.
    assert devices.share(2, 3, 4, 2) == (0, 1)


@pytest.fixture
def visible() -> Any:
    name = "jax_cuda_visible_devices"
    before = jax.config.values[name]
    yield lambda: jax.config.values[name]
    jax.config.update(name, before)


def test_restricting_the_visible_devices(
    visible: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def log(level: str, text: str) -> None:
        lines.append(f"{level}: {text}")

    placement.restrict_visible_devices([2], False, log)
    assert visible() == "2"
    placement.restrict_visible_devices([3], False, log)  # the setting exists already
    assert visible() == "2"
    jax.config.update("jax_cuda_visible_devices", "all")
    placement.restrict_visible_devices([3], True, log)  # too late, but JAX uses no GPU
    assert (visible(), lines) == ("all", [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    placement.restrict_visible_devices([3], True, log)
    assert visible() == "all"
    assert lines[0].startswith("warning: JAX was used before ringjax.init()")
    assert "CUDA_VISIBLE_DEVICES=3" in lines[0]


class Device:
    """The attributes of a JAX device that ringjax reads."""

    def __init__(self, platform: str, version: str, number: int) -> None:
        self.platform, self.local_hardware_id = platform, number
        self.client = type("Client", (), {"platform_version": version})


def test_the_device_of_jax_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.cuda_devices()[0] == ()  # these tests compute on the CPU
    device = Device("gpu", "cuda 13000", 5)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    before = jax.config.values["jax_platforms"]
    try:
        for platforms in ("", "cuda", "cpu,gpu"):
            jax.config.update("jax_platforms", platforms)
            assert placement.cuda_devices() == ((5,), "")
        device.client.platform_version = "rocm 60000"
        assert placement.cuda_devices() == ((), "JAX computes on gpu")
        jax.config.update("jax_platforms", "tpu")
        assert placement.cuda_devices() == ((), "JAX_PLATFORMS is tpu")
    finally:
        jax.config.update("jax_platforms", before)


def test_jax_is_not_queried_if_no_rank_has_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("JAX was asked for its device")

    monkeypatch.setattr(placement, "cuda_devices", refuse)
    ringjax.init()
    try:
        world = runtime.current("test")
        world.devices.counts = [0]
        placement.open_devices(world, True)
        monkeypatch.setattr(
            placement, "cuda_devices", lambda each: ([], "as the test says")
        )
        world.devices.counts = [1]
        placement.open_devices(world, True)
        expected = "rank 0 has no CUDA device: as the test says"
        assert world.devices.problem(0) == expected
    finally:
        ringjax.shutdown()


def test_gpu_settings_are_parsed() -> None:
    plain = Config.from_env({})
    assert (plain.gpu, plain.nccl, plain.comm_stream) == (True, "", True)
    assert (plain.fusion, plain.fusion_small) == ("hybrid", 1 << 20)
    chosen = Config.from_env(
        {
            "RINGJAX_GPU": "0",
            "RINGJAX_NCCL": "/opt/libnccl.so.2",
            "RINGJAX_FUSION": "GROUP",
            "RINGJAX_FUSION_SMALL": "0",
            "RINGJAX_COMM_STREAM": "off",
        }
    )
    assert (chosen.gpu, chosen.nccl) == (False, "/opt/libnccl.so.2")
    assert (chosen.fusion, chosen.fusion_small) == ("group", 0)
    assert chosen.comm_stream is False
    with pytest.raises(ValueError, match="expected one of hybrid, pack, group"):
        Config.from_env({"RINGJAX_FUSION": "some"})


def test_init_imports_jax_only_if_devices_exist() -> None:
    code = """
import sys, ringjax
from ringjax import _native
found = _native.cuda_info() | {"devices": [], "driver_error": "none"}
_native.cuda_info = lambda: found
ringjax.init()
print("jax" in sys.modules)
ringjax.shutdown()
found["devices"] = [{"name": "of the test"}]
ringjax.init()
print("ringjax.xla.jax_private" in sys.modules)
import jax._src.xla_bridge as bridge
print(bridge.backends_are_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment("loads", {"JAX_PLATFORMS": "cpu"}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    # JAX_PLATFORMS suffices to know that JAX uses no GPU, so no backend is initialised.
    assert done.stdout.split() == ["False", "True", "False"], done.stderr
