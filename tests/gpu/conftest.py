"""Tests that need a real GPU and are skipped without one.

They run on one device and one rank. `make gpu-check` also runs several ranks on one
device. The tests of the CUDA and NCCL stubs are elsewhere.
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
    """Skips the tests of this folder, except the schedules, if there is no device."""
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
    """Turns the check for leaks off: CUDA and JAX keep threads and descriptors."""


@pytest.fixture(scope="module")
def device() -> Iterator[driver.Device]:
    """The first device, opened by the driver's API only."""
    found = driver.Device()
    yield found
    found.release_all()
