"""Fixtures of the tests on real engines, which start once for each file.

`make test-engines` runs these files. Plain pytest does not collect them, because they
are not named test_*.py. They need the extras `ray` and `spark`, or Slurm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

# Set before Ray is imported: Ray sends no usage statistics, and the nodes of a cluster,
# which are all on this machine, need no token.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Checks that no thread of ringjax remains in the driver. An engine may remain."""
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("ringjax-")]
    assert not left, f"threads are left behind: {left}"
