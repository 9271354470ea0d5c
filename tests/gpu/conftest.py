"""Tests that need a real GPU: all are skipped without one, and say so.

They run on one device and one rank; several ranks on one device are a part of
`make gpu-check`. The stubs of CUDA and NCCL have tests of their own, elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Behind everything else: the ringjax under test must not come from the checkout.
sys.path.append(str(ROOT))
from benchmarks.gpu import driver  # noqa: E402

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder if there is no device, but for schedules."""
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    needy = [item for item in mine if item.path.name.startswith("test_")]
    count, why = driver.count_devices() if needy else (1, "")
    for item in mine:
        # Warnings of JAX's CUDA plugin must not fail the tests.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if not count and item in needy:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {why}"))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not here: CUDA and JAX keep threads and descriptors as long as they like."""


@pytest.fixture(scope="module")
def device() -> Iterator[driver.Device]:
    """The first device, through the driver alone."""
    found = driver.Device()
    yield found
    found.release_all()
