"""ringjax.eager: named operations on arrays of NumPy, JAX, PyTorch and others.

test_eager_grid.py tests every operation on every dtype and shape, on NumPy arrays.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from support.stacked import raises

import ringjax
from ringjax import eager
from ringjax.errors import Mismatch

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("torch")]

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
)


def mine(rank: int, shape: tuple[int, ...] = (3, 2), dtype: str = "float32") -> Any:
    """Returns the input of `rank`: small integers, so that all sums are exact."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = np.random.default_rng(rank).integers(0, 4, shape)
    return values.astype(kind)


def total(size: int, shape: tuple[int, ...] = (3, 2), dtype: str = "float32") -> Any:
    return np.sum([mine(r, shape, dtype) for r in range(size)], axis=0)


def as_torch(x: Any) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(x)


def in_each_framework(x: Any) -> list[Any]:
    """Returns `x` as an array of NumPy, of JAX and of PyTorch."""
    return [x, jnp.asarray(x), as_torch(x)]


def values(x: Any) -> Any:
    return x.float().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_an_average_of_integers_wraps_around_before_it_divides(
    world, dtype: str
) -> None:
    most = np.iinfo(dtype).max
    x = np.full(3, most - 7, dtype)
    wrapped = np.sum([x] * world.size, axis=0, dtype=dtype)
    expected = np.trunc(wrapped / world.size).astype(dtype)
    assert not (expected == x).any()
    np.testing.assert_array_equal(eager.allreduce(x, name=f"wraps {dtype}"), expected)
    np.testing.assert_array_equal(ringjax.allreduce(jnp.asarray(x)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_different_frameworks_are_reduced(world, dtype: str) -> None:
    x = mine(world.rank, dtype=dtype)
    with jax.enable_x64(True):
        given = in_each_framework(x)
        for turn in range(3):
            value = given[(world.rank + turn) % 3]
            out = eager.allreduce(value, ringjax.Sum, name=f"mixed {dtype} {turn}")
            assert type(out) is type(value)
            assert str(out.dtype) == str(value.dtype)
            expected = total(world.size, dtype=dtype).astype(x.dtype)
            if isinstance(out, torch.Tensor):
                assert torch.equal(out, as_torch(expected))
            else:
                np.testing.assert_array_equal(np.asarray(out), expected)


def test_one_name_through_two_apis(world) -> None:
    import ringjax.torch as hvd

    x = mine(world.rank)
    if world.rank % 2:
        out = hvd.allreduce(torch.from_numpy(x), op=hvd.Sum, name="shared")
    else:
        out = eager.allreduce(jnp.asarray(x), op=ringjax.Sum, name="shared")
        assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), total(world.size))


def test_bfloat16_of_unknown_size(world) -> None:
    x = mine(world.rank, (world.rank + 1, 2), "bfloat16")
    rows = np.concatenate(
        [mine(r, (r + 1, 2), "bfloat16") for r in range(world.size)]
    ).astype(np.float32)
    for turn in range(3):
        value = in_each_framework(x)[(world.rank + turn) % 3]
        out = eager.allgather(value, name=f"rows {turn}")
        assert str(out.dtype).endswith("bfloat16")
        np.testing.assert_array_equal(values(out).astype(np.float32), rows)


def test_arguments_are_not_modified(world) -> None:
    x = mine(world.rank)
    for value in in_each_framework(x):
        eager.allreduce(value, ringjax.Sum, name="read only")
        np.testing.assert_array_equal(values(value), x)
    locked = x.copy()
    locked.setflags(write=False)
    out = eager.allreduce(locked, ringjax.Sum, name="read only")
    np.testing.assert_array_equal(out, total(world.size))


@pytest.mark.ranks(1, 3)
def test_numbers_and_buffers(world) -> None:
    assert eager.allreduce(1.5, ringjax.Sum) == 1.5 * world.size
    assert eager.allreduce(2, ringjax.Max) == 2
    scalar = eager.allreduce(np.float32(2), ringjax.Sum)
    assert type(scalar) is np.float32
    assert scalar == 2 * world.size
    data = bytearray([world.rank, 1])
    assert eager.allreduce(data, ringjax.Sum).tolist() == [
        sum(range(world.size)),
        world.size,
    ]
    assert eager.allgather(b"ab").tobytes() == b"ab" * world.size
    transposed = np.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(eager.allreduce(transposed), transposed)
    big_endian = np.arange(3, dtype=">f4")
    np.testing.assert_array_equal(eager.allreduce(big_endian), big_endian)


def test_groups(world) -> None:
    shapes = [(3,), (), (2, 2)]
    given = [mine(world.rank, s) for s in shapes]
    given[1] = torch.from_numpy(given[1])
    out = eager.grouped_allreduce(given, ringjax.Sum, name="group")
    assert isinstance(out, list)
    for got, shape in zip(out, shapes, strict=True):
        np.testing.assert_array_equal(got, total(world.size, shape))
    rows = eager.grouped_allgather([given[0], given[2]], name="group")
    assert [r.shape for r in rows] == [(3 * world.size,), (2 * world.size, 2)]
    parts = eager.grouped_reducescatter([given[0], given[2]], ringjax.Sum, name="group")
    every = [eager.allgather(part) for part in parts]
    np.testing.assert_array_equal(every[0], total(world.size, (3,)))
    np.testing.assert_array_equal(every[1], total(world.size, (2, 2)))


def test_factors_and_ops(world) -> None:
    x = mine(world.rank, dtype="float64")
    every = np.stack([mine(r, dtype="float64") for r in range(world.size)])
    call = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    out = eager.allreduce(x, ringjax.Sum, **call)
    np.testing.assert_allclose(out, 1.5 * every.sum(0), rtol=1e-15)
    for op, oracle in ((ringjax.Min, np.min), (ringjax.Max, np.max)):
        np.testing.assert_array_equal(eager.allreduce(x, op), oracle(every, 0))
    np.testing.assert_array_equal(eager.allreduce(x, ringjax.Product), every.prod(0))
    np.testing.assert_allclose(eager.allreduce(x), every.mean(0), rtol=1e-15)


def test_broadcast_from_every_root(world) -> None:
    for root in range(world.size):
        for value in in_each_framework(mine(world.rank)):
            out = eager.broadcast(value, root, name="from root")
            np.testing.assert_array_equal(values(out), mine(root))


def test_alltoall(world) -> None:
    x = np.repeat(np.arange(world.size), 2) + 10 * world.rank
    out = eager.alltoall(x)
    expected = np.repeat(10 * np.arange(world.size) + world.rank, 2)
    np.testing.assert_array_equal(out, expected)
    splits = list(range(world.size))
    sent = np.repeat(np.arange(world.size), splits) + 10 * world.rank
    out, received = eager.alltoall(torch.from_numpy(sent), splits)
    assert received.tolist() == [world.rank] * world.size
    np.testing.assert_array_equal(
        out, np.repeat(10 * np.arange(world.size) + world.rank, world.rank)
    )


def test_any_order_and_any_thread(world) -> None:
    names = [f"order {i}" for i in range(40)]
    order = np.random.default_rng(100 + world.rank).permutation(len(names))
    handles: dict[int, eager.Handle] = {}

    def submit(part: Any) -> None:
        for i in part:
            x = np.full(i + 1, float(world.rank))
            handles[i] = eager.allreduce_async(x, ringjax.Sum, name=names[i])

    threads = [threading.Thread(target=submit, args=(order[k::3],)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in reversed(range(len(names))):
        out = eager.synchronize(handles[i])
        assert handles[i].done()
        np.testing.assert_array_equal(out, np.full(i + 1, sum(range(world.size))))
        assert eager.poll(handles[i])
        assert eager.synchronize(handles[i]) is None


@pytest.mark.ranks(1, 3)
def test_join_takes_part_until_the_last(world) -> None:
    turns = world.rank + 1
    for turn in range(turns):
        out = eager.allreduce(np.ones(3), ringjax.Sum, name=f"turn {turn}")
        np.testing.assert_array_equal(out, np.full(3, world.size - turn))
    last = eager.join()
    assert last == eager.broadcast(last, 0)
    assert 0 <= last < world.size
    assert eager.allreduce(1, ringjax.Sum) == world.size


def test_objects(world) -> None:
    config = {"lr": 0.1, "layers": [64, (1, 2)], "mask": np.eye(2), "rank": world.rank}
    for root in range(world.size):
        got = eager.broadcast_object(config, root)
        assert got["rank"] == root
        assert got["layers"] == [64, (1, 2)]
    everyone = eager.allgather_object("x" * world.rank)
    assert everyone == ["x" * r for r in range(world.size)]
    with raises(TypeError, "broadcast_object", "rank 0 cannot be sent"):
        eager.broadcast_object(threading.Lock())
    pickled = eager.broadcast_object(world.rank.__class__, allow_pickle=True)
    assert pickled is int


@pytest.mark.ranks(3)
def test_process_sets(world) -> None:
    pair = ringjax.add_process_set([0, 2])
    try:
        if world.rank == 1:
            with raises(ValueError, "ringjax.allreduce", "does not include this rank"):
                eager.allreduce(1.0, process_set=pair)
        else:
            out = eager.allreduce(world.rank, ringjax.Sum, process_set=pair)
            assert out == 2
            assert eager.broadcast(world.rank, 2, process_set=pair) == 2
            with raises(ValueError, "root_rank is 1", "[0, 2]"):
                eager.broadcast(1.0, 1, process_set=pair)
            assert eager.join(pair) in (0, 2)
            eager.barrier(process_set=pair)
    finally:
        ringjax.remove_process_set(pair)


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_raise_and_continue(world) -> None:
    shape = (17, 2 + (world.rank == 1))
    with raises(Mismatch, "shape", "allreduce 'grad'", "f32[17,2]", "f32[17,3]"):
        eager.allreduce(np.ones(shape, np.float32), name="grad")
    dtype = np.float32 if world.rank else np.int32
    with raises(Mismatch, "dtype", "'grad'", "rank"):
        eager.allreduce(np.ones(3, dtype), name="grad")
    with raises(Mismatch, "root", "'grad'"):
        eager.broadcast(np.ones(3), min(world.rank, 1), name="grad")
    assert eager.allreduce(1.0, ringjax.Sum, name="grad") == world.size


@pytest.mark.ranks(2)
def test_a_name_twice(world) -> None:
    if world.rank == 0:
        first = eager.allreduce_async(1.0, ringjax.Sum, name="twice")
        with raises(ValueError, "allreduce 'twice'", "duplicate"):
            eager.allreduce_async(1.0, ringjax.Sum, name="twice")
        eager.barrier()
        assert first.wait() == 2.0
    else:
        eager.barrier()
        assert eager.allreduce(1.0, ringjax.Sum, name="twice") == 2.0


def test_bad_arguments(world) -> None:
    with raises(TypeError, "ringjax.allreduce 'x'", "list is no array"):
        eager.allreduce([1, 2], name="x")
    with raises(TypeError, "ringjax.allreduce", "dtype str"):
        eager.allreduce(np.array(["a"]))
    with raises(TypeError, "inside"):
        jax.jit(eager.allreduce)(jnp.ones(2))
    with raises(ValueError, "op is 17"):
        eager.allreduce(1.0, 17)
    with raises(TypeError, "prescale_factor must be a number"):
        eager.allreduce(1.0, prescale_factor="x")
    with raises(TypeError, "name must be a str"):
        eager.allreduce(1.0, name=3)
    with raises(ValueError, "no rows"):
        eager.allgather(1.0)
    with raises(ValueError, "no rows"):
        eager.reducescatter(np.float32(1))
    with raises(ValueError, "list or tuple"):
        eager.grouped_allreduce([])
    with raises(ValueError, "splits must be integers"):
        eager.alltoall(np.ones(3), [0.5])
    with raises(ValueError, "is not the handle"):
        eager.poll(7)
    assert eager.synchronize(7) is None
    wrong = [1] * (world.size + 1)
    with raises(ValueError, "alltoall"):
        eager.alltoall(np.ones(world.size), wrong)
    with raises(ValueError, "alltoall"):
        eager.alltoall(np.ones(world.size + 1), [1] * world.size)
    with raises(ValueError, "alltoall"):
        eager.alltoall(np.ones(world.size), [-1] * world.size)


def test_any_framework_with_dlpack(world) -> None:
    """docs/train/eager.md promises this."""

    class DlpackArray:
        """An array of an unknown framework that implements DLPack."""

        def __init__(self, values: Any) -> None:
            self.values = np.ascontiguousarray(values)

        def __dlpack__(self, **options: Any) -> Any:
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.values.__dlpack_device__()

        def __setitem__(self, place: Any, values: Any) -> None:
            self.values[place] = values

    gradients = {name: DlpackArray(mine(world.rank)) for name in ("weight", "bias")}
    handles = [
        eager.allreduce_async(gradient, ringjax.Average, name=f"dlpack.{name}")
        for name, gradient in gradients.items()
    ]
    for gradient, handle in zip(gradients.values(), handles, strict=True):
        gradient[:] = eager.synchronize(handle)
    for gradient in gradients.values():
        np.testing.assert_allclose(gradient.values, total(world.size) / world.size)
    sent = eager.broadcast(DlpackArray(mine(world.rank)), 0, name="dlpack.parameter")
    np.testing.assert_array_equal(sent, mine(0))


class OldArray:
    """An array of a framework from before DLPack, such as MXNet."""

    def __init__(self, values: Any, stype: str = "default", on: str = "cpu") -> None:
        self.values, self.stype = values, stype
        self.context = SimpleNamespace(device_type=on)

    def asnumpy(self) -> Any:
        return self.values.copy()

    def __setitem__(self, place: Any, values: Any) -> None:
        self.values[place] = values


def test_any_framework_with_asnumpy(world) -> None:
    """The results are numpy arrays, which the program writes back."""
    gradient = OldArray(mine(world.rank))
    gradient[:] = eager.allreduce(gradient, ringjax.Sum, name="old")
    np.testing.assert_array_equal(gradient.values, total(world.size))
    handle = eager.broadcast_async(OldArray(mine(world.rank)), 1, name="old")
    np.testing.assert_array_equal(eager.synchronize(handle), mine(1))
    out = np.empty_like(mine(0))
    given = [OldArray(mine(world.rank))]
    assert eager.grouped_allreduce(given, ringjax.Sum, out=[out])[0] is out
    np.testing.assert_array_equal(out, total(world.size))
    gathered = eager.allgather(OldArray(mine(world.rank)), name="old")
    np.testing.assert_array_equal(gathered, np.vstack([mine(r) for r in range(3)]))


def test_arrays_whose_copy_would_surprise_are_refused() -> None:
    ones = np.ones(2, np.float32)
    with raises(TypeError, "OldArray", "its storage is row_sparse; make it dense"):
        eager.allreduce(OldArray(ones, stype="row_sparse"), name="old")
    with raises(TypeError, "gpu", "copy it to the CPU first"):
        eager.allreduce(OldArray(ones, on="gpu"), name="old")
    with raises(TypeError, "asnumpy() returned a list"):
        eager.allreduce(OldArray([1.0]), name="old")
    with raises(TypeError, "got OldArray", "instead: `array[:] = result`"):
        eager.allreduce(OldArray(ones), name="old", out=OldArray(ones))
