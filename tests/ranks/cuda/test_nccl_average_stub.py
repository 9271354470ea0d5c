"""Averages of 16-bit floats, which NCCL would round before the sum, on stubs of CUDA.

The stub of NCCL rounds like NCCL: in bfloat16, 1/3 becomes 0.3340.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from support.device_calls import Device, open_at_init, reopen, wire
from support.device_code import needs_kernels
from support.draws import dtype_of
from support.rank_worker import VARIABLE, World
from support.stubs import stub_environment

from ringjax import runtime

pytestmark = [needs_kernels, pytest.mark.ranks(2, 3, env=stub_environment)]

LARGE = (1 << 19) + 3  # elements: too many to be packed with other tensors


@pytest.fixture(scope="module", autouse=True)
def device_at_init() -> None:
    if VARIABLE in os.environ:
        open_at_init()


@pytest.fixture(params=["hybrid", "pack", "group"])
def device(request: pytest.FixtureRequest, world: World) -> Device:
    if runtime.config().fusion != request.param:
        return reopen(RINGJAX_FUSION=request.param)
    return Device()


def mean(sums: np.ndarray, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Divides 16-bit sums in float32, and rounds once."""
    return (sums.astype(dtype).astype("f4") * np.float32(1 / size)).astype(dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_averages_are_rounded_once(device: Device, name: str) -> None:
    dtype, size = dtype_of(name), device.size
    base = np.arange(LARGE) % 61 - 30.0
    sums = base * size + size * (size - 1) / 2
    x = (base + device.rank).astype(dtype)
    for count in (LARGE, 5):
        out = np.empty(count, dtype)
        device.run("allreduce", [x[:count]], [out], reduce="Average")
        np.testing.assert_array_equal(out, mean(sums[:count], size, dtype))
    rows = [2, 0, 3][:size]
    mine = np.tile((base[: sum(rows)] + device.rank).astype(dtype), 1)
    part = np.empty(rows[device.rank], dtype)
    device.run("reducescatter", [mine], [part], counts=rows, reduce="Average")
    first = sum(rows[: device.rank])
    want = mean(sums[first : first + rows[device.rank]], size, dtype)
    np.testing.assert_array_equal(part, want)


def test_a_mean_of_large_numbers_stays_finite(device: Device) -> None:
    x = np.full(LARGE, 60000, np.float16)
    device.run("allreduce", [x], reduce="Average")
    assert np.isfinite(x).all()
    np.testing.assert_allclose(x.astype("f4"), 60000, rtol=1e-3)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_compressed_averages_scale_in_float32(device: Device, name: str) -> None:
    x = np.full(7, 1.5 * (device.rank + 1), np.float32)
    device.run("allreduce", [x], reduce="Average", wire=wire(name))
    exact = np.float32(1.5 * sum(range(1, device.size + 1)) / device.size)
    np.testing.assert_allclose(x, exact, rtol=1e-6)
