"""Calls that ranks refuse or disagree about, on stubs of CUDA and not on a GPU.

NCCL and its stub would hang or mix up bytes. ringjax must abort on all ranks with one
message, and must mark the results as void. Each test ends with a new epoch.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.device_calls import Device, open_at_init, reopen, wire
from support.device_code import HAS_KERNELS
from support.rank_worker import VARIABLE, World
from support.stubs import stub_environment

import ringjax
from ringjax import _native, runtime

pytestmark = pytest.mark.ranks(2, 3, env=stub_environment)


@pytest.fixture(scope="module", autouse=True)
def device_at_init() -> None:
    if VARIABLE in os.environ:
        open_at_init()


@pytest.fixture
def device(world: World) -> Device:
    return Device()


@pytest.fixture
def failing_device(device: Device) -> Iterator[Device]:
    """Yields a communicator that the test may abort; checks a new one afterwards."""
    yield device
    again = reopen()
    x = np.full(5, again.rank + 1.0, np.float32)
    again.run("allreduce", [x])
    assert (x == sum(range(again.size + 1))).all()


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# For each mistake, a call and words of its error.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dtype": (
        {"op": "allreduce", "ins": [f32(2), np.ones(3, np.int16)], "name": "count"},
        ["allreduce 'count'", "i16"],
    ),
    "complex product": (
        {"op": "allreduce", "ins": [np.ones(3, np.complex64)], "reduce": "Product"},
        ["allreduce", "PRODUCT", "c64"],
    ),
    "maximum of complex numbers": (
        {"op": "allreduce", "ins": [np.ones(3, np.complex64)], "reduce": "Max"},
        ["allreduce", "c64"],
    ),
    "average of bool": (
        {"op": "allreduce", "ins": [np.ones(3, bool)], "reduce": "Average"},
        ["allreduce", "bool"],
    ),
    "scaled bool": (
        {"op": "allreduce", "ins": [np.ones(3, bool)], "prescale": 0.5},
        ["allreduce", "bool"],
    ),
    "adasum": (
        {"op": "allreduce", "ins": [f32(3)], "reduce": "Adasum", "name": "sum"},
        ["allreduce 'sum'"],
    ),
    "root": (
        {"op": "broadcast", "ins": [f32(3)], "root": 9, "name": "weights"},
        ["broadcast 'weights'", "root_rank=9"],
    ),
    "result": (
        {"op": "allreduce", "ins": [f32(3)], "outs": [f32(4)], "name": "grads"},
        ["allreduce 'grads'", "f32[3]", "16 bytes"],
    ),
    "rows": (
        {"op": "allgather", "ins": [f32(3)], "outs": [f32(9)], "name": "parts"},
        ["allgather 'parts'", "compiled for another number of ranks"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_all_ranks_refuse_unsupported_calls(failing_device: Device, what: str) -> None:
    call, words = REFUSED[what]
    with pytest.raises(_native.StatusError) as caught:
        failing_device.run(**call)
    for word in ["RINGJAX[world (device), epoch ", *words]:
        assert word in str(caught.value), caught.value
    assert ringjax.errors.from_status(caught.value).args  # the code is a known one


@pytest.mark.parametrize("what", ["dtype", "root", "result"])
def test_one_rank_alone_refuses_its_call(failing_device: Device, what: str) -> None:
    culprit = failing_device.size - 1
    call, words = REFUSED[what]
    valid: dict[str, Any] = {k: call[k] for k in ("op", "name")}
    valid |= {"ins": [f32(3)]}
    _, message = run_until_error(
        failing_device, call if failing_device.rank == culprit else valid
    )
    if failing_device.rank != culprit:
        assert f"rank {culprit}" in message
    assert words[-1] in message


def run_until_error(device: Device, call: dict[str, Any]) -> tuple[bool, str]:
    """Makes a call that must abort the communicator.

    Returns:
        Whether the call was enqueued before the abort, and the message of the error.
    """
    accepted = False
    with pytest.raises(_native.StatusError) as caught:
        device.enqueue(**call)
        accepted = True
        while True:
            device.core.synchronize()
            time.sleep(0.01)
    return accepted, str(caught.value)


def _valid_call(**changes: Any) -> dict[str, Any]:
    call = {"op": "allreduce", "ins": [f32(4), f32(2)], "name": "grads"}
    return call | changes


# For each mistake, words of the error, and what the last rank changes in _valid_call().
DISAGREEMENTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "shape": (["f32[4]", "f32[5]"], {"ins": [f32(5), f32(2)]}),
    "rank": (["f32[4]", "f32[2,2]"], {"ins": [f32(2, 2), f32(2)]}),
    "dtype": (["f32[4]", "i32[4]"], {"ins": [np.ones(4, np.int32), f32(2)]}),
    "op": (["SUM", "MAX"], {"reduce": "Max"}),
    "name": (["grads", "loss"], {"name": "loss"}),
    "number": (["2 tensors", "3 tensors"], {"ins": [f32(4), f32(2), f32(1)]}),
    "collective": (["allreduce", "broadcast"], {"op": "broadcast"}),
    "wire": (["none", "bf16"], {"wire": wire("bf16")}),
    "factor": (["prescale_factor=1", "prescale_factor=0.5"], {"prescale": 0.5}),
}


# NCCL hangs only at these mistakes. With the others, NCCL may complete the operations
# before ringjax has compared the calls.
HANGING = ("shape", "dtype", "op", "number", "collective", "wire")


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_one_message(
    failing_device: Device, what: str
) -> None:
    if what in ("wire", "factor") and not HAS_KERNELS:
        pytest.skip("built without device code")
    device, (shown, changes) = failing_device, DISAGREEMENTS[what]
    culprit, large = device.size - 1, np.ones(1 << 19, np.float32)
    call = _valid_call(**(changes if device.rank == culprit else {}))
    call["ins"] = [a.copy() for a in call["ins"]] + [large]  # `large` is not packed
    device.run("barrier")  # connects; later calls only enqueue
    accepted, message = run_until_error(device, call)
    for word in [*shown, "rank 0", f"rank {culprit}"]:
        assert word in message or word.split()[-1] == "tensors", message
    # All ranks must have one text. They compare it by the host communicator, because
    # the device communicator has failed.
    host = runtime.current("test").communicators[0]
    mine = np.array([zlib.crc32(message.encode())], np.uint32)
    every = np.zeros(device.size, np.uint32)
    host.execute(1, 1, [mine], [every], counts=[1] * device.size)
    assert (every == mine).all(), message
    with pytest.raises(_native.StatusError, match="ranks disagree"):
        device.run("allreduce", [f32(1)])
    with pytest.raises(_native.StatusError, match="ranks disagree"):
        device.core.synchronize()
    for array in call["ins"]:
        if HAS_KERNELS and accepted and what in HANGING and array.dtype == np.float32:
            assert np.isnan(array.flat[0]), what


def test_calls_in_another_order(failing_device: Device) -> None:
    """The calls of each rank are valid, but their order differs on the last rank."""
    names = ["left", "right"]
    if failing_device.rank == failing_device.size - 1:
        names.reverse()
    with pytest.raises(_native.StatusError, match=r"ranks disagree.*'(left|right)'"):
        for name in names:
            failing_device.enqueue("allreduce", [f32(4)], name=name)
        while True:
            failing_device.core.synchronize()
            time.sleep(0.01)


def test_splits_that_do_not_fit_together(failing_device: Device) -> None:
    device = failing_device
    size, rank = device.size, device.rank
    sends = [1] * size
    receives = [2 if rank == 0 and r == 1 else 1 for r in range(size)]
    out = f32(sum(receives))
    call = {"op": "alltoall", "ins": [f32(size)], "outs": [out], "name": "tokens"}
    _, message = run_until_error(device, {**call, "counts": sends + receives})
    assert "splits" in message
    assert "tokens" in message
