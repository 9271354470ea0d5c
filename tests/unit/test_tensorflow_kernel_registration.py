"""Tests that a kernel's done callback, a `std::function`, is moved only if known."""

from __future__ import annotations

import ctypes

import pytest
from support.frameworks import in_ranks

kernel_registration = in_ranks("ringjax.tensorflow.kernel_registration")
pytestmark = [pytest.mark.ranks(1), pytest.mark.launch("tensorflow")]
Words = ctypes.c_void_p * 4


def test_the_done_callback_is_moved_and_called() -> None:
    code = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    theirs, called = Words(5, 6, code, code), []

    def run(address: int) -> None:
        called.append(list(Words.from_address(address)))

    then = kernel_registration.KernelDoneCallback(ctypes.addressof(theirs), run)
    assert then.outlives_kernel
    assert theirs[2] is None  # an empty std::function, so its owner destroys nothing
    theirs[0] = 0
    then()
    assert called == [[5, 6, code, code]]


def test_an_unknown_done_callback_is_not_moved() -> None:
    theirs, called = Words(1, 2, 3, 4), []
    then = kernel_registration.KernelDoneCallback(
        ctypes.addressof(theirs), called.append
    )
    assert not then.outlives_kernel
    then()
    assert called == [ctypes.addressof(theirs)]
    assert list(theirs) == [1, 2, 3, 4]
