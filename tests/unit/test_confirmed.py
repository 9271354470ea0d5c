"""Tests that the host checks for mismatches before it reads a result outside jit.

On a CUDA device, a call returns before the ranks have compared their calls. On a CPU
there is nothing to wait for, so these tests inject the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

import ringjax
from ringjax import errors, runtime
from ringjax.xla import primitive

TEXT = "RINGJAX[world (device), epoch 0]: allgather 'rows': ranks disagree"


class Status(Exception):
    """A fake of the native core's exception, with a code and a rank."""

    code, rank = "MISMATCH", -1


@pytest.fixture
def disagreed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ringjax.init()

    def confirm() -> None:
        raise errors.Mismatch(TEXT) from Status()

    monkeypatch.setattr(runtime, "confirm", confirm)
    yield
    ringjax.shutdown()


@pytest.mark.usefixtures("disagreed")
@pytest.mark.parametrize(
    "call",
    [
        ringjax.barrier,
        lambda: primitive.read_result(np.ones(2)),
        lambda: ringjax.broadcast_object(1),
        lambda: ringjax.allgather_object(1),
        lambda: ringjax.broadcast_parameters({"w": np.ones(2)}),
    ],
    ids=["barrier", "read", "broadcast_object", "allgather_object", "parameters"],
)
def test_a_mismatch_is_raised_before_the_result_is_used(
    call: Callable[[], object],
) -> None:
    with (
        pytest.raises(errors.Mismatch, match="allgather 'rows': ranks disagree"),
        errors.translated(),
    ):
        call()


@pytest.mark.usefixtures("disagreed")
def test_the_exception_is_jaxs_runtime_error() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="MISMATCH: RINGJAX"):
        ringjax.barrier()
