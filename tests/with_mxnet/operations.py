"""ringjax.mxnet: the operations, their errors, and Horovod's names."""

from __future__ import annotations

import doctest
import inspect
import sys
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import ringjax.mxnet as hvd
from ringjax.doctor import software
from ringjax.errors import Mismatch
from ringjax.run import check_build

pytestmark = pytest.mark.ranks(1, 2, 3)
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")
MAKERS = [mx.nd.array, mx.np.array]


def mine(rank: int, shape: tuple[int, ...] = (3, 2), dtype: str = "float32") -> Any:
    """Returns the input of `rank`: small integers, so that all sums are exact."""
    return np.random.default_rng(rank).integers(0, 4, shape).astype(dtype)


def equal(found: Any, expected: Any) -> None:
    assert isinstance(found, mx.nd.NDArray) and found.dtype == expected.dtype
    np.testing.assert_array_equal(found.asnumpy(), expected)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation(world, dtype: str, make: Any) -> None:
    rank, size = world.rank, world.size
    inputs = [mine(r, (6, 2), dtype) for r in range(size)]
    x = make(inputs[rank], dtype=dtype)
    greatest = np.max(inputs, axis=0)
    found = hvd.allreduce(x, op=hvd.Max, name="a")
    equal(found, greatest)
    equal(x, inputs[rank])
    assert type(found) is type(x)
    assert hvd.allreduce_(found, op=hvd.Min, name="b") is found
    several = [x.copy(), x[:1].copy()]
    equal(hvd.grouped_allreduce(several, op=hvd.Max, name="c")[1], greatest[:1])
    equal(several[0], inputs[rank])
    assert hvd.grouped_allreduce_(several, op=hvd.Max, name="c") is several
    equal(several[0], greatest)
    rows = [value[: r + 1] for r, value in enumerate(inputs)]
    equal(hvd.allgather(x[: rank + 1], name="d"), np.concatenate(rows))
    both = hvd.grouped_allgather([x, x[: rank + 1]], name="e")
    equal(both[0], np.concatenate(inputs))
    equal(both[1], np.concatenate(rows))
    last = size - 1
    equal(hvd.broadcast(x, last, name="f"), inputs[last])
    equal(x, inputs[rank])
    equal(hvd.reducescatter(x, hvd.Max, name="g"), np.split(greatest, size)[rank])
    [part] = hvd.grouped_reducescatter([x], hvd.Max, name="g")
    equal(part, np.split(greatest, size)[rank])
    swapped = np.concatenate([np.split(value, size)[rank] for value in inputs])
    equal(hvd.alltoall(x, name="h"), swapped)
    splits = make([6 // size] * size, dtype="int32")
    got, received = hvd.alltoall(x, splits, name="i")
    equal(got, swapped)
    equal(received, np.full(size, 6 // size, np.int32))
    assert hvd.broadcast_(x, last, name="j") is x
    equal(x, inputs[last])


def test_arrays_of_unusual_shapes(world) -> None:
    size, whole = world.size, mx.nd.arange(12).reshape((6, 2))
    equal(hvd.allreduce(mx.nd.array(3.0), op=hvd.Sum), np.float32(3.0 * size))
    hvd.allreduce_(whole[2:4], op=hvd.Sum)  # a view
    expected = np.arange(12, dtype="f4").reshape(6, 2)
    expected[2:4] *= size
    equal(whole, expected)
    turned = mx.nd.arange(6).reshape((2, 3)).T
    equal(hvd.allreduce(turned), np.arange(6, dtype="f4").reshape(2, 3).T)
    half = mx.nd.ones(2, dtype="float16")
    mixed = hvd.grouped_allreduce([half, mx.nd.ones(3)], op=hvd.Sum)
    equal(mixed[0], np.full(2, size, "f2"))
    equal(mixed[1], np.full(3, size, "f4"))
    none = mx.nd.array(np.empty((0, 2), "f4"))
    assert hvd.allgather(none).shape == (0, 2)
    assert hvd.grouped_allreduce([]) == []


def test_the_operands_may_still_be_computed(world) -> None:
    for _ in range(20):
        x = mx.nd.ones((300, 300))
        for _ in range(3):
            x = mx.nd.dot(x, x) / 300
        y = hvd.allreduce_(x, op=hvd.Sum, name="late") + 1
        assert float(y.sum().asscalar()) == 90000 * (world.size + 1)


def test_factors_averages_and_horovods_former_argument(world) -> None:
    size, x = world.size, mx.nd.ones(2) * (world.rank + 1)
    mean = np.full(2, (size + 1) / 2, "f4")
    equal(hvd.allreduce(x), mean)
    scaled = hvd.allreduce(
        x, prescale_factor=2.0, postscale_factor=4.0, op=hvd.Sum, priority=-3
    )
    equal(scaled, mean * size * 8)
    with pytest.warns(DeprecationWarning, match="average"):
        equal(hvd.allreduce(x, average=False), mean * size)
    with pytest.warns(DeprecationWarning, match="average"):
        equal(hvd.allreduce_(x.copy(), True), mean)
    with pytest.raises(ValueError, match="give only one"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def test_objects(world) -> None:
    arrays = {"weights": mx.nd.ones(2) * world.rank}
    assert hvd.broadcast_object(arrays, root_rank=0)["weights"].sum().asscalar() == 0
    everyone = hvd.allgather_object(arrays)
    assert [int(x["weights"][0].asscalar()) for x in everyone] == [*range(world.size)]


@pytest.mark.ranks(3)
def test_process_sets(world) -> None:
    pair = hvd.add_process_set([0, 2])
    x = mx.nd.ones(1) * world.rank
    if pair.included():
        equal(hvd.allreduce(x, op=hvd.Sum, process_set=pair), np.float32([2]))
        equal(hvd.broadcast(x, 2, process_set=pair), np.float32([2]))
        equal(hvd.allgather(x, process_set=pair), np.float32([0, 2]))
    else:
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(x, process_set=pair)
    hvd.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_ranks_that_disagree(world) -> None:
    with pytest.raises(Mismatch, match=r"(?s)'shapes'.*f32\[2\].*f32\[3\]"):
        hvd.allreduce(mx.nd.ones(2 + world.rank), name="shapes")
    kinds = ("float32", "int32")
    with pytest.raises(Mismatch, match=r"'kinds'"):
        hvd.broadcast(mx.nd.ones(2, dtype=kinds[world.rank]), 0, name="kinds")
    equal(hvd.allreduce(mx.nd.ones(2), name="shapes"), np.ones(2, "f4"))


@pytest.mark.ranks(1)
def test_what_is_no_dense_array_on_the_cpu_is_refused() -> None:
    sparse = mx.nd.ones((3, 2)).tostype("row_sparse")
    calls = (
        *(hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall),
        *(lambda x, name: hvd.broadcast(x, 0, name=name), hvd.reducescatter),
    )
    for call in calls:
        with pytest.raises(TypeError, match="'x'.*row_sparse.*tostype"):
            call(sparse, name="x")
        with pytest.raises(TypeError, match="'x'.*got a ndarray; use ringjax.eager"):
            call(np.ones(3), name="x")
    with pytest.raises(TypeError, match="got a list"):
        hvd.grouped_allreduce([[1.0]])
    with pytest.raises(ValueError, match="no rows"):
        hvd.reducescatter(mx.nd.array(1.0))
    with pytest.raises(ValueError, match="splits must be integers"):
        hvd.alltoall(mx.nd.ones(2), mx.nd.ones(1))


@pytest.mark.ranks(1)
def test_an_array_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array can be made on a GPU here, so an array says that it is on one."""
    monkeypatch.setattr(mx.nd.NDArray, "context", mx.gpu(0))
    with pytest.raises(TypeError, match=r"gpu\(0\); write array.as_in_context"):
        hvd.allreduce_(mx.nd.ones(2), name="x")


@pytest.mark.ranks(1)
def test_names_and_arguments_are_those_of_horovod() -> None:
    names = """
    Adasum Average Compression DistributedOptimizer DistributedTrainer Max Min
    ProcessSet Product Sum add_process_set allgather allgather_object allreduce
    allreduce_ alltoall broadcast broadcast_ broadcast_object broadcast_parameters
    ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built
    gloo_enabled grouped_allgather grouped_allreduce grouped_allreduce_
    grouped_reducescatter init is_initialized local_rank local_size mpi_built
    mpi_enabled mpi_threads_supported nccl_built rank reducescatter remove_process_set
    rocm_built shutdown size start_timeline stop_timeline
    """
    assert not [name for name in names.split() if not hasattr(hvd, name)]
    factors = "prescale_factor postscale_factor"
    reduce = f"average name priority {factors} process_set op"
    some = "name priority process_set"
    averaging = "num_groups process_set"
    expected = {
        "allreduce": f"tensor {reduce}",
        "allreduce_": f"tensor {reduce}",
        "grouped_allreduce": f"tensors {reduce}",
        "grouped_allreduce_": f"tensors {reduce}",
        "allgather": f"tensor {some}",
        "grouped_allgather": f"tensors {some}",
        "broadcast": f"tensor root_rank {some}",
        "broadcast_": f"tensor root_rank {some}",
        "alltoall": f"tensor splits {some}",
        "reducescatter": f"tensor op {some} {factors}",
        "grouped_reducescatter": f"tensors op {some} {factors}",
        "broadcast_object": "obj root_rank name",
        "allgather_object": "obj name",
        "broadcast_parameters": "params root_rank prefix",
        "DistributedOptimizer": f"optimizer gradient_predivide_factor {averaging}",
        "DistributedTrainer": "params optimizer optimizer_params compression "
        f"gradient_predivide_factor prefix {averaging} kvstore update_on_kvstore",
    }
    found = {
        name: " ".join(inspect.signature(getattr(hvd, name)).parameters)
        for name in expected
    }
    assert found == expected


@pytest.mark.ranks(1)
def test_diagnoses_do_not_ask_for_jax() -> None:
    [finding] = software.fitting(None)  # type: ignore[arg-type]
    assert finding.status == "ok" and "mxnet 1.9.1, without jax" in finding.text
    assert "[X] MXNet 1.9.1 (ringjax.mxnet)" in check_build.report()


@pytest.mark.ranks(1)
def test_the_examples_of_docstrings_run_without_jax() -> None:
    result = doctest.testmod(hvd)
    assert result.failed == 0 and result.attempted > 10
    assert "jax" not in sys.modules
