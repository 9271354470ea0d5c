"""A Ray cluster on this machine, and threads that run a job on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

MARKS = [
    pytest.mark.timeout(180),
    # Ray itself causes these warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SMALL: Any = {"object_store_memory": 80 << 20}  # bytes


@contextlib.contextmanager
def ray_cluster(connect: bool = True, **head: Any) -> Iterator[Cluster]:
    """Starts a cluster whose head runs no workers; `connect` makes this a driver."""
    with pytest.MonkeyPatch.context() as patch:
        # Nodes and workers import the functions of these tests.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        head = {"num_cpus": 0, "include_dashboard": False, **SMALL, **head}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            if connect:
                ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


class JobThread(threading.Thread):
    """Runs a job in a thread while the test changes or kills parts of the cluster."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__()
        self._fn, self.result, self.error = fn, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._fn()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        self.join(100)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result
