"""A device communicator of one rank on a GPU: real NCCL, real streams, no JAX.

One rank is enough to test types, streams, memory in place and out of place, and the end
of an epoch. test_collectives.py tests several ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringjax import _native
from ringjax.config import Config
from ringjax.world import devices

NUMPY = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "u8": np.uint8, "i32": np.int32, "u32": np.uint32, "i64": np.int64,
    "u64": np.uint64,
}  # fmt: skip
OPS, REDUCE = _native.COLLECTIVES, _native.REDUCE_OPS
IDS = itertools.count(1 << 20)
SHAPES = [(), (3,), (0,), (17, 5), (400_003,)]  # the last is reduced in place


def connect(fusion: str = "hybrid", comm_stream: int = 1) -> Any:
    """Returns a communicator of one rank with a unique id."""
    # RINGJAX_NCCL may name the stub although a wheel has brought the real library.
    devices.open_library(Config.from_env().nccl)
    (control,) = _native.local_world([0])
    (made,) = _native.connect_devices(
        id=next(IDS),
        controls=[control],
        devices=[0],
        unique_ids=[_native.nccl_unique_id()],
        options={
            "start_timeout": 40.0,
            "fusion": fusion,
            "fusion_small": float(1 << 20),
            "comm_stream": float(comm_stream),
        },
    )
    return made


# All tests share a communicator because NCCL takes half a second to connect.
@pytest.fixture(scope="module", params=["hybrid", "pack", "group"])
def communicator(request) -> Iterator[Any]:
    made = connect(request.param)
    yield made
    made.close()


class Tensors:
    """Arrays on the device, with the arguments for a communicator."""

    def __init__(self, device: Any, arrays: list[Any]) -> None:
        self.device, self.arrays = device, arrays
        self.pointers = [device.allocate(a.nbytes) for a in arrays]
        for pointer, array in zip(self.pointers, arrays, strict=True):
            if array.nbytes:
                device.upload(pointer, array)

    def ins(self, dtype: str) -> list[tuple[int, int, list[int]]]:
        number = _native.DTYPES[dtype]
        pairs = zip(self.pointers, self.arrays, strict=True)
        return [(p, number, list(a.shape)) for p, a in pairs]

    def outs(self) -> list[tuple[int, int]]:
        return [(p, a.nbytes) for p, a in zip(self.pointers, self.arrays, strict=True)]

    def read(self) -> list[Any]:
        found = []
        for pointer, array in zip(self.pointers, self.arrays, strict=True):
            values = np.empty_like(array)
            if array.nbytes:
                self.device.download(pointer, values)
            found.append(values)
        return found

    def close(self) -> None:
        for pointer in self.pointers:
            self.device.release(pointer)


def draw(dtype: str, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    low = 0 if dtype[0] == "u" else -4
    return [
        np.asarray(rng.integers(low, 5, shape)).astype(NUMPY[dtype]) for shape in SHAPES
    ]


def same(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_allreduce_of_one_rank_changes_nothing(communicator, device, dtype, op) -> None:
    arrays = draw(dtype)
    here, there = Tensors(device, arrays), Tensors(device, draw(dtype, 1))
    for target in (there, here):  # in place at last
        communicator.execute(
            *(OPS["allreduce"], REDUCE[op], here.ins(dtype), target.outs()),
            stream=device.stream,
            name="test",
        )
        communicator.synchronize(device.stream)
        same(target.read(), arrays)
    here.close()
    there.close()


@pytest.mark.parametrize("wire", [-1, "f16", "bf16"])
def test_scales_and_compression(communicator, device, wire) -> None:
    arrays = draw("f32")
    tensors = Tensors(device, arrays)
    communicator.execute(
        *(OPS["allreduce"], REDUCE["Sum"], tensors.ins("f32"), tensors.outs()),
        stream=device.stream,
        wire=wire if wire == -1 else _native.DTYPES[wire],
        prescale=0.5,
        postscale=6.0,
    )
    communicator.synchronize(device.stream)
    same(tensors.read(), [(3 * a).astype(np.float32) for a in arrays])
    tensors.close()


@pytest.mark.parametrize("comm_stream", [0, 1])
def test_start_and_done_keep_the_order_of_the_stream(device, comm_stream) -> None:
    communicator = connect("pack", comm_stream)
    count = 1 << 24
    arrays = [np.zeros(count, np.float32), np.zeros(3, np.float32)]
    tensors, copy = Tensors(device, arrays), device.allocate(4 * count)
    for value in (1.5, 2.5):
        word = int(np.float32(value).view(np.uint32))
        for pointer, array in zip(tensors.pointers, arrays, strict=True):
            device.fill(pointer, word, array.nbytes)  # not waited for
        communicator.start(
            *(tensors.ins("f32"), tensors.outs()),
            site=0,
            first=True,
            stream=device.stream,
            reduce_op=REDUCE["Sum"],
            postscale=2.0,
        )
        communicator.done(site=0, stream=device.stream)
        device.copy(copy, tensors.pointers[0], 4 * count)
        device.fill(tensors.pointers[0], 0, 4 * count)
        got = np.empty(count, np.float32)
        device.download(copy, got)
        assert (got == 2 * value).all()
    communicator.synchronize(device.stream)
    communicator.close()
    tensors.close()
    device.release(copy)


@pytest.mark.parametrize("op", ["allgather", "broadcast", "reducescatter", "alltoall"])
def test_the_other_collectives(communicator, device, op) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    here, there = Tensors(device, [array]), Tensors(device, [0 * array])
    counts = {"allgather": [4], "reducescatter": [4], "alltoall": [4, 4]}
    communicator.execute(
        *(OPS[op], REDUCE["Sum"], here.ins("f32"), there.outs()),
        stream=device.stream,
        counts=counts.get(op, []),
    )
    communicator.synchronize(device.stream)
    same(there.read(), [array])
    here.close()
    there.close()


def test_barrier(communicator, device) -> None:
    communicator.execute(OPS["barrier"], REDUCE["Sum"], [], [], stream=device.stream)
    communicator.synchronize(device.stream)


# Alone in the world, hybrid fusion has nothing to gain from packing.
@pytest.mark.parametrize(("fusion", "packs"), [("hybrid", 0), ("pack", 1)])
def test_statistics_of_allreduce(device, fusion, packs) -> None:
    communicator = connect(fusion)
    sizes = (5, 7, 1 << 20)
    tensors = Tensors(device, [np.ones(size, np.float32) for size in sizes])
    for calls in (1, 2):
        communicator.execute(
            *(OPS["allreduce"], REDUCE["Sum"], tensors.ins("f32"), tensors.outs()),
            stream=device.stream,
        )
        stats = communicator.stats()["allreduce"]
        assert stats["calls"] == calls
        assert stats["bytes"] == calls * 4 * sum(sizes)
        assert 0 < stats["seconds"] < 5
        assert stats["packed_bytes"] == packs * stats["bytes"]
    communicator.synchronize(device.stream)
    communicator.close()
    tensors.close()


def test_after_an_abort_nothing_is_sent(device) -> None:
    communicator = connect()
    communicator.check()
    communicator.abort("rank 0 has failed", 0)
    assert communicator.aborted
    for call in (
        communicator.check,
        communicator.confirm,
        lambda: communicator.synchronize(device.stream),
        lambda: communicator.execute(
            OPS["barrier"], REDUCE["Sum"], [], [], stream=device.stream
        ),
    ):
        with pytest.raises(_native.StatusError, match="rank 0 has failed"):
            call()
    communicator.close()
    communicator.close()
    connect().close()  # another epoch works


def test_epochs_end_by_an_abort_as_in_an_elastic_job(device) -> None:
    """Each epoch ends by an abort with work in flight, and the next epoch works."""
    tensors = Tensors(device, [np.ones(n, np.float32) for n in (5, 7, 1 << 20)])
    call = OPS["allreduce"], REDUCE["Sum"], tensors.ins("f32"), tensors.outs()
    for _ in range(3):
        communicator = connect("pack")
        for value in (2.0, 3.0):
            for pointer, array in zip(tensors.pointers, tensors.arrays, strict=True):
                array[...] = value
                device.upload(pointer, array)
            communicator.execute(*call, stream=device.stream)
            communicator.confirm()
            same(tensors.read(), tensors.arrays)
        communicator.execute(*call, stream=device.stream)
        communicator.abort("rank 1 was lost", 1)
        with pytest.raises(_native.StatusError, match="rank 1 was lost"):
            communicator.confirm()
        communicator.close()
    tensors.close()
