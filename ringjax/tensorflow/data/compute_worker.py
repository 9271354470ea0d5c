"""The program of the compute job, which prepares data for TensorFlow's data service.

``ringrun -np 4 python -m ringjax.tensorflow.data.compute_worker CONFIG.json`` writes
the file that the training program reads. It runs until the training program shuts the
service down.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence

from ringjax import runtime
from ringjax.tensorflow.data.compute_registry import ComputeService
from ringjax.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    compute_worker_fn,
)
from ringjax.tensorflow.functions import broadcast_object


def main(
    dispatchers: int, dispatcher_side: str, configfile: str, timeout: int = 60
) -> None:
    """Runs a rank of the compute job.

    Args:
        dispatchers: the number of dispatchers; the ranks are divided among them.
        dispatcher_side: the job that runs the dispatchers, "compute" or "training".
        configfile: the path of the file that rank 0 writes.
        timeout: seconds to wait for the other job.

    Raises:
        ValueError: the ranks cannot be divided, or `dispatcher_side` is unknown.
        TimeoutError: the other job has not registered in time.
    """
    if dispatcher_side not in ("compute", "training"):
        raise ValueError(
            f"dispatcher_side is {dispatcher_side!r}, expected 'compute' or 'training'"
        )
    runtime.init()
    size = runtime.size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            f"Number of processes ({size}) must be a multiple of number of dispatchers "
            f"({dispatchers})."
        )
    service = config = None
    try:
        if runtime.rank() == 0:
            key, each = secrets.token_bytes(32), size // dispatchers
            service = ComputeService(dispatchers, each, key)
            addresses = service.address_map()
            config = TfDataServiceConfig(
                dispatchers, each, dispatcher_side, addresses, key, timeout
            )
            config.write(configfile)
        name = "TfDataServiceConfig"
        compute_worker_fn(broadcast_object(config, root_rank=0, name=name))
    finally:
        if service is not None:
            service.shutdown()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses `words`, or the command line of the process if `words` is None."""
    parser = argparse.ArgumentParser(
        prog="python -m ringjax.tensorflow.data.compute_worker",
        description="Prepares data for training jobs, by TensorFlow's data service.",
    )
    parser.add_argument("configfile", help="file to write for the training job")
    parser.add_argument(
        "--dispatchers", default=1, type=int, help="number of dispatchers (1)"
    )
    parser.add_argument(
        "--dispatcher-side",
        default="compute",
        choices=["compute", "training"],
        help="where the dispatchers run (compute)",
    )
    parser.add_argument(
        "--timeout", default=60, type=int, help="seconds to wait for the others (60)"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    given = parse()
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)
