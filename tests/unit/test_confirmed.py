"""The host waits for the agreement of the ranks before it reads a result outside jit.

On a CUDA device a call returns before the ranks are known to have made the same one. On
a CPU there is nothing to wait for, so a test puts the failure there itself.
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
    """Stands for the exception of the native core, with its code and rank."""

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
def test_a_disagreement_is_raised_before_the_result_is_used(
    call: Callable[[], object],
) -> None:
    with (
        pytest.raises(errors.Mismatch, match="allgather 'rows': ranks disagree"),
        errors.translated(),
    ):
        call()


@pytest.mark.usefixtures("disagreed")
def test_its_class_is_that_of_a_program() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="MISMATCH: RINGJAX"):
        ringjax.barrier()
