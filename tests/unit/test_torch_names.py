"""Tests that ringjax.torch has Horovod's names, arguments and defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ringjax
import ringjax.torch as hvd


def test_names_and_signatures_are_those_of_horovod() -> None:
    def arguments(f: Any) -> str:
        found = inspect.signature(f).parameters.values()
        return ", ".join(
            p.name if p.default is p.empty else f"{p.name}={_default(p.default)}"
            for p in found
        )

    tail = "prescale_factor=1.0, postscale_factor=1.0"
    reduce = f"average=None, name=None, op=None, {tail}, process_set=global"
    packed = reduce.replace("op=None", "compression=none, op=None")
    scatter = f"name=None, op=0, process_set=global, {tail}"
    some = "name=None, process_set=global"
    expected = {
        "allreduce": f"tensor, {packed}",
        "grouped_allreduce": f"tensors, {packed}",
        "sparse_allreduce_async": "tensor, name, op, process_set=global",
        "reducescatter": f"tensor, {scatter.replace('op', 'compression=none, op')}",
        "join": "device=-1",
        "barrier": "process_set=global",
        "broadcast_parameters": "params, root_rank",
        "broadcast_optimizer_state": "optimizer, root_rank, model=None",
        "broadcast_object": "obj, root_rank=0, name=None, process_set=global",
        "allgather_object": "obj, name=None",
        "grouped_reducescatter": (
            f"tensors, {scatter.replace('op', 'compression=none, op')}"
        ),
    }
    for name in ("allreduce_async", "allreduce_async_", "allreduce_"):
        expected[name] = f"tensor, {reduce}"
        expected[f"grouped_{name}"] = f"tensors, {reduce}"
    for end in ("", "_async"):
        expected[f"allgather{end}"] = f"tensor, {some}"
        expected[f"grouped_allgather{end}"] = f"tensors, {some}"
        expected[f"alltoall{end}"] = f"tensor, splits=None, {some}"
        for last in ("", "_"):
            expected[f"broadcast{end}{last}"] = f"tensor, root_rank, {some}"
    expected["reducescatter_async"] = f"tensor, {scatter}"
    expected["grouped_reducescatter_async"] = f"tensors, {scatter}"
    assert {name: arguments(getattr(hvd, name)) for name in expected} == expected
    assert hvd.init is ringjax.init
    assert [int(hvd.mpi_ops.Average), hvd.Sum, hvd.Adasum] == [0, 1, 2]


def _default(value: Any) -> str:
    if value is hvd.global_process_set:
        return "global"
    if value is hvd.Compression.none:
        return "none"
    return repr(int(value) if isinstance(value, ringjax.ops.ReduceOp) else value)


def test_all_names_of_horovod_exist() -> None:
    names = """
    Adasum Average Compression DistributedOptimizer Max Min ProcessSet Product Sum
    SyncBatchNorm add_process_set ccl_built cross_rank cross_size cuda_built
    ddl_built elastic global_process_set gloo_built gloo_enabled init is_homogeneous
    is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported
    nccl_built poll rank remove_process_set rocm_built shutdown size start_timeline
    stop_timeline sycl_built synchronize HorovodInternalError"""
    assert not [name for name in names.split() if not hasattr(hvd, name)]
    with pytest.raises(AttributeError, match="no attribute 'allreduceee'"):
        hvd.allreduceee  # noqa: B018
