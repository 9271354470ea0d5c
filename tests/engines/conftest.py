"""Real engines: started once for the tests of a file, and ended with them.

`make test-engines` runs these files; plain pytest does not collect them, since they are
not called test_*.py. They need what the extras `ray` and `spark` bring, or Slurm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

# Before Ray is imported: it tells nobody that it was used, and the nodes of a cluster,
# all of them here, need no token.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """An engine keeps its processes; of ringjax nothing may be left in the driver."""
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("ringjax-")]
    assert not left, f"threads are left behind: {left}"
