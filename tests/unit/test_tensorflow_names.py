"""Tests that ringjax.tensorflow has Horovod's names, arguments and defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.frameworks import in_ranks

import ringjax

hvd = in_ranks("ringjax.tensorflow")
mpi_ops = in_ranks("ringjax.tensorflow.mpi_ops")
pytestmark = [pytest.mark.ranks(1), pytest.mark.launch("tensorflow")]


def _default(value: Any) -> str:
    if value is hvd.global_process_set:
        return "global"
    if value is hvd.Compression.none:
        return "none"
    return repr(int(value) if isinstance(value, ringjax.ops.ReduceOp) else value)


def arguments(function: Any) -> str:
    found = inspect.signature(function).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={_default(p.default)}"
        for p in found
    )


def test_signatures_are_those_of_horovod() -> None:
    factors = "prescale_factor=1.0, postscale_factor=1.0"
    devices = "device_dense='', device_sparse='', compression=none"
    rest = "ignore_name_scope=False, process_set=global"
    scatter = "device_dense='', compression=none, op=0"
    inner = f"name=None, op=1, {factors}, {rest}"
    expected = {
        "allreduce": (
            f"tensor, average=None, {devices}, op=None, {factors}, name=None, "
            "process_set=global, ignore_name_scope=False"
        ),
        "grouped_allreduce": (
            f"tensors, average=None, {devices}, op=None, {factors}, "
            "process_set=global, ignore_name_scope=False, name=None"
        ),
        "reducescatter": (
            f"tensor, {scatter}, name=None, process_set=global, "
            f"ignore_name_scope=False, {factors}"
        ),
        # Horovod has no argument `name` here.
        "grouped_reducescatter": (
            f"tensors, {scatter}, process_set=global, ignore_name_scope=False, "
            f"{factors}, name=None"
        ),
        "allgather": f"tensor, name=None, {rest}",
        "grouped_allgather": f"tensors, name=None, {rest}",
        "broadcast": f"tensor, root_rank, name=None, {rest}",
        "broadcast_": "variables, root_rank, name=None, process_set=global",
        "alltoall": f"tensor, splits=None, name=None, {rest}",
        "join": "",
        "size_op": "process_set_id=0, name=None",
        "process_set_included_op": "process_set_id=0, name=None",
        "rank_op": "name=None",
        "local_rank_op": "name=None",
        "local_size_op": "name=None",
    }
    assert {name: arguments(getattr(hvd, name)) for name in expected} == expected
    assert arguments(mpi_ops._allreduce) == f"tensor, {inner}"
    assert arguments(mpi_ops._grouped_allreduce) == f"tensors, {inner}"
    assert hvd.init is ringjax.init


def test_all_names_of_horovod_exist() -> None:
    names = """
    Adasum Average Compression Max Min ProcessSet Product Sum add_process_set
    ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built
    gloo_enabled handle_average_backwards_compatibility check_num_rank_power_of_2 init
    is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built rank remove_process_set rocm_built shutdown size
    start_timeline stop_timeline sycl_built"""
    assert not [name for name in names.split() if not hasattr(hvd, name)]
    assert mpi_ops._normalize_name("a/b:0") == "a_b_0"
    assert hvd.handle_average_backwards_compatibility(hvd.Max, None) == hvd.Max
    assert hvd.check_num_rank_power_of_2(4)
    assert not hvd.gpu_available("tensorflow") or hvd.cuda_built()
