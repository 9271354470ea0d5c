"""The pack and unpack kernels on a GPU against numpy: types, sizes, places, scale."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringjax import _native

NUMPY = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "u8": np.uint8, "i32": np.int32, "u32": np.uint32, "i64": np.int64,
    "u64": np.uint64, "bool": np.bool_,
}  # fmt: skip
SAME = [(name, name) for name in NUMPY]
CAST = [(a, b) for a in ("f32", "f64") for b in ("f16", "bf16")]
ODD = [(), (1,), (0,), (3,), (4,), (5, 7), (1023,), (4096,), (4097,), (8193, 3)]
GUARD = 64  # bytes between tensors that kernels must not write
MARK = 0xA5


class Tensors:
    """Tensors with guards between them in one block, and a fused buffer."""

    def __init__(self, device: Any, shapes: Any, dtype: str, wire: str, shift: int):
        self.device, self.dtype = device, np.dtype(NUMPY[dtype])
        self.wire = np.dtype(NUMPY[wire])
        self.number, self.code = _native.DTYPES[dtype], _native.DTYPES[wire]
        self.places, place = [], GUARD
        for shape in shapes:
            place = -(-place // 16) * 16 + shift * self.dtype.itemsize
            self.places.append((place, tuple(shape)))
            place += math.prod(shape) * self.dtype.itemsize + GUARD
        self.bytes = np.full(-(-place // 16) * 16, MARK, np.uint8)
        sizes = [math.prod(s) * self.wire.itemsize for s in shapes]
        self.offsets = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)])
        self.fused = np.full(int(self.offsets[-1]) + GUARD, MARK, np.uint8)
        self.block = device.allocate(len(self.bytes))
        self.buffer = device.allocate(len(self.fused))

    def view(self, place: int, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape) * self.dtype.itemsize
        return self.bytes[place : place + size].view(self.dtype).reshape(shape)

    def fill(self, seed: int = 0, top: int = 64) -> list[Any]:
        """Draws small integers, exact in every type; returns copies of the tensors."""
        rng = np.random.default_rng(seed)
        low = 0 if self.dtype.kind in "ub" else -top
        for place, shape in self.places:
            values = rng.integers(low, top + 1, shape)
            self.view(place, shape)[...] = values.astype(self.dtype)
        return [self.view(*each).copy() for each in self.places]

    def run(self, *, unpack: bool, scale: float = 1.0) -> int:
        self.device.upload(self.block, self.bytes)
        self.device.upload(self.buffer, self.fused)
        launches = _native.pack(
            [(self.block + p, self.number, list(s)) for p, s in self.places],
            self.buffer,
            wire=-1 if self.wire == self.dtype else self.code,
            scale=scale,
            stream=self.device.stream,
            unpack=unpack,
            device=self.device.number,
        )
        self.device.download(self.block, self.bytes)
        self.device.download(self.buffer, self.fused)
        return int(launches)

    def packed(self) -> list[Any]:
        return [
            self.fused[start : start + math.prod(shape) * self.wire.itemsize]
            .view(self.wire)
            .reshape(shape)
            for start, (_, shape) in zip(self.offsets, self.places, strict=False)
        ]

    def check_guards(self) -> None:
        touched = np.ones(len(self.bytes), bool)
        for place, shape in self.places:
            touched[place : place + math.prod(shape) * self.dtype.itemsize] = False
        assert (self.bytes[touched] == MARK).all(), "written beside a tensor"
        assert (self.fused[-GUARD:] == MARK).all(), "written behind the buffer"

    def close(self) -> None:
        self.device.release(self.block)
        self.device.release(self.buffer)


def same(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


@pytest.mark.parametrize(("dtype", "wire"), SAME + CAST)
@pytest.mark.parametrize("shift", [0, 1])
def test_unpack_restores_the_packed_tensors(device, dtype, wire, shift) -> None:
    tensors = Tensors(device, ODD, dtype, wire, shift)
    values = tensors.fill()
    assert tensors.run(unpack=False) >= 1
    same(tensors.packed(), values)
    tensors.check_guards()
    tensors.fill(seed=1)
    tensors.run(unpack=True)
    same([tensors.view(*each) for each in tensors.places], values)
    tensors.check_guards()
    tensors.close()


@pytest.mark.parametrize(("dtype", "wire"), [("f32", "f32"), ("f64", "f64"), *CAST])
def test_scale(device, dtype, wire) -> None:
    tensors = Tensors(device, ODD, dtype, wire, 0)
    values = tensors.fill()
    tensors.run(unpack=False, scale=0.5)
    same(tensors.packed(), [v * 0.5 for v in values])
    tensors.run(unpack=True, scale=4.0)
    same([tensors.view(*each) for each in tensors.places], [v * 2.0 for v in values])
    tensors.close()


@pytest.mark.parametrize("wire", ["f16", "bf16"])
def test_casts_round_to_nearest_even(device, wire) -> None:
    tensors = Tensors(device, [(100_003,)], "f32", wire, 0)
    values = np.random.default_rng(2).normal(size=100_003).astype(np.float32)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-40]
    tensors.view(*tensors.places[0])[...] = values
    tensors.run(unpack=False)
    with np.errstate(over="ignore"):
        want = values.astype(NUMPY[wire])
    got = tensors.packed()[0]
    nan = np.isnan(values)
    assert np.isnan(got[nan].astype(np.float32)).all()
    same([got[~nan]], [want[~nan]])
    tensors.close()


@pytest.mark.parametrize("count", [168, 169, 1360, 1361, 3000])
def test_any_number_of_tensors(device, count) -> None:
    shapes = [(1 + (7 * i) % 97,) for i in range(count)]
    tensors = Tensors(device, shapes, "f32", "f32", 0)
    values = tensors.fill()
    launches = tensors.run(unpack=False)
    assert launches <= -(-count // 168)
    same(tensors.packed(), values)
    tensors.run(unpack=True)
    same([tensors.view(*each) for each in tensors.places], values)
    tensors.check_guards()
    tensors.close()


def test_many_tensors_take_one_launch(device) -> None:
    tensors = Tensors(device, [(33,)] * 1204, "f32", "bf16", 0)
    tensors.fill()
    assert tensors.run(unpack=False) == 1
    tensors.close()


def test_a_large_tensor(device) -> None:
    tensors = Tensors(device, [(5,), (50_000_017,), (3,)], "f32", "bf16", 1)
    values = tensors.fill()
    tensors.run(unpack=False)
    same(tensors.packed(), values)
    tensors.check_guards()
    tensors.close()
