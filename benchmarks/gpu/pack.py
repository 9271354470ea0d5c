"""Bandwidth of the pack and unpack kernels against a copy within the device.

The kernels alone, through `_native.pack`, with memory and events of the driver. Copies
of the same number of bytes run in the same round. A long copy runs first, so that all
work is queued and the host's speed does not matter. Neither JAX nor NCCL is used.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.driver import ALIGNMENT, Device
from benchmarks.gpu.models import SETS
from benchmarks.gpu.section import Report, Spread, attempt, section

WIRES = {"f32": 4, "bf16": 2, "f16": 2}
ROTATE = 400 << 20  # bytes of all tensors that take turns: several times the L2 cache
BLOCK = 1 << 30  # bytes of the copy that keeps the device busy while a round is queued
PATTERN = 1 << 22  # float32 numbers, with which all tensors are filled repeatedly
CHECKED = 170  # most tensors of a set whose elements are all compared
# Targets: (set, type on the wire) -> per cent of the copy's bandwidth.
TARGETS = {
    ("ResNet-50", "f32"): 90,
    ("ResNet-50", "bf16"): 90,
    ("transformer", "f32"): 95,
    ("transformer", "bf16"): 95,
}


def round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def fused_bytes(shapes: Sequence[Sequence[int]], width: int) -> int:
    """Returns the size of the fused buffer, whose tensors are aligned to 16 bytes."""
    return sum(round_up(math.prod(shape) * width, 16) for shape in shapes)


def moved_bytes(shapes: Sequence[Sequence[int]], width: int) -> int:
    """Returns the bytes that packing float32 tensors moves, without padding."""
    return sum(math.prod(shape) for shape in shapes) * (4 + width)


@dataclass
class Tensors:
    """float32 tensors in one allocation, as `_native.pack` takes them, and a buffer."""

    ins: list[tuple[int, int, tuple[int, ...]]]
    fused: int
    start: int
    bytes: int


@dataclass
class Case:
    """An operation that is timed in every round."""

    name: str
    run: Callable[[int], None]
    samples: list[float] = field(default_factory=list)


def lay_out(device: Device, shapes: Sequence[tuple[int, ...]], dtype: int) -> Tensors:
    """Allocates tensors as XLA's allocator does, and a fused buffer for float32."""
    sizes = [round_up(math.prod(shape) * 4, ALIGNMENT) for shape in shapes]
    start, place, ins = device.allocate(sum(sizes)), 0, []
    for shape, size in zip(shapes, sizes, strict=True):
        ins.append((start + place, dtype, tuple(shape)))
        place += size
    fused = device.allocate(fused_bytes(shapes, 4))
    return Tensors(ins, fused, start, sum(sizes))


class Bench:
    """Times the kernels on one set of tensors."""

    def __init__(self, device: Device, name: str, report: Report, rounds: int) -> None:
        from ringjax import _native

        self._native = _native
        self.device, self.name, self.report, self.rounds = device, name, report, rounds
        self.shapes = SETS[name]
        self.f32 = _native.DTYPES["f32"]
        size = fused_bytes(self.shapes, 4)
        copies = 1 if size > ROTATE else max(2, -(-ROTATE // size))
        self.sets = [lay_out(device, self.shapes, self.f32) for _ in range(copies)]
        for tensors in self.sets:  # no zeros, which can be faster than real data
            device.fill(tensors.start, 0x3F8CCCCD, tensors.bytes)
            device.fill(tensors.fused, 0x3F8C3F8C, round_up(size, 4))
        device.synchronize()

    def pack(self, turn: int, wire: str, *, unpack: bool, scale: float = 1.0) -> int:
        """Launches the kernels for one of the sets; returns the number of launches."""
        tensors = self.sets[turn % len(self.sets)]
        code = -1 if wire == "f32" else self._native.DTYPES[wire]
        launches = self._native.pack(
            tensors.ins,
            tensors.fused,
            wire=code,
            scale=scale,
            stream=self.device.stream,
            unpack=unpack,
            device=self.device.number,
        )
        return int(launches)

    def copy(self, turn: int, moved: int) -> None:
        """Copies within the device; reads plus writes `moved` bytes."""
        tensors = self.sets[turn % len(self.sets)]
        self.device.copy(tensors.fused, tensors.start, moved // 2 // 4 * 4)

    def check(self, wire: str) -> None:
        """Packs and unpacks known numbers, and checks the results."""
        tensors, device = self.sets[0], self.device
        numbers = np.random.default_rng(1).integers(-64, 65, PATTERN)
        pattern = numbers.astype(np.float32)
        step = min(pattern.nbytes, tensors.bytes)
        device.upload(tensors.start, pattern[: step // 4])
        for place in range(step, tensors.bytes, step):
            size = min(step, tensors.bytes - place)
            device.copy(tensors.start + place, tensors.start, size)
        self.pack(0, wire, unpack=False, scale=0.5)
        device.fill(tensors.start, 0x7FC00000, tensors.bytes)  # the word is a NaN
        self.pack(0, wire, unpack=True, scale=4.0)
        stride = -(-len(tensors.ins) // CHECKED)
        for pointer, _, shape in tensors.ins[::stride]:
            first = (pointer - tensors.start) // 4
            want = np.resize(np.roll(pattern, -first), shape)
            got = np.empty_like(want)
            device.download(pointer, got)
            if not np.array_equal(got, 2 * want):
                wrong = int((got != 2 * want).sum())
                raise ArithmeticError(
                    f"{self.name}, {wire}: {wrong} wrong elements in a {shape} tensor"
                )

    def measure(self, wire: str) -> None:
        """Measures packing and unpacking with one type on the wire; returns rows."""
        attempt(self.report, f"{self.name} {wire}", self.check, wire)
        moved = moved_bytes(self.shapes, WIRES[wire])
        cases = [
            Case("copy", lambda turn: self.copy(turn, moved)),
            Case("pack", lambda turn: void(self.pack(turn, wire, unpack=False))),
            Case("unpack", lambda turn: void(self.pack(turn, wire, unpack=True))),
        ]
        take_turns(self.device, cases, self.rounds)
        rates = {
            case.name: Spread.of([moved / s / 1e9 for s in case.samples])
            for case in cases
        }
        launches = self.pack(0, wire, unpack=False)
        self.device.synchronize()
        for case in cases[1:]:
            share = Spread.of(
                [
                    100 * c / s
                    for c, s in zip(cases[0].samples, case.samples, strict=True)
                ]
            )
            what = f"{self.name}, {wire}, {case.name}"
            target = self.report.compare_with_target(
                what, share.median, TARGETS.get((self.name, wire)), " %"
            )
            micros = Spread.of([1e6 * s for s in case.samples])
            kind = f"f32 -> {wire}" if wire != "f32" else "f32"
            self.report.row(
                *(self.name, len(self.shapes), kind, case.name, launches),
                *(micros.show(), rates[case.name].show(0), rates["copy"].show(0)),
                *(share.show(), target),
            )
            self.report.value(f"share/{what}", share.median)


def void(_: Any) -> None:
    """Calls the function and drops its result."""


def take_turns(device: Device, cases: Sequence[Case], rounds: int) -> None:
    """Times every case once in each round, in an order that changes with the round."""
    block = device.allocate(BLOCK)
    marks = [device.event() for _ in range(len(cases) + 1)]
    for number in range(rounds + 2):
        shift = number % len(cases)
        order = [*cases[shift:], *cases[:shift]]
        # The host is far ahead of the device when the device reaches the first mark.
        device.copy(block, block + BLOCK // 2, BLOCK // 2)
        device.copy(block + BLOCK // 2, block, BLOCK // 2)
        device.record(marks[0])
        for case, mark in zip(order, marks[1:], strict=True):
            case.run(number)
            device.record(mark)
        device.synchronize()
        if number >= 2:  # the first rounds load the kernels and raise the clocks
            for i, case in enumerate(order):
                case.samples.append(device.seconds(marks[i], marks[i + 1]))
    device.release(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    options = parser.parse_args()
    with section() as report:
        device = Device()
        report.table(
            f"Pack and unpack on {device.name}",
            *("tensors", "n", "types", "kernel", "launches", "µs", "GB/s"),
            *("copy GB/s", "% of copy", "target"),
        )
        report.note(
            "GB/s: bytes read plus written. Copy: one cuMemcpyDtoDAsync that moves as "
            f"many bytes, in the same round. Median (p10–p90), {options.rounds} rounds"
        )
        for name in options.sets:
            need = 2.1 * fused_bytes(SETS[name], 4) + 2 * ROTATE + BLOCK
            if 0 < device.free_bytes() < need:
                report.note(f"{name}: not run, it needs {need / 1e9:.0f} GB")
                continue
            bench = attempt(report, name, Bench, device, name, report, options.rounds)
            for wire in WIRES if bench else ():
                attempt(report, f"{name} {wire}", bench.measure, wire)
            device.release_all()


if __name__ == "__main__":
    main()
