"""Processes of a world apart, for tests: each joins, then runs the lines of a test.

The lines use `world`, `rank`, `total` and `gathered`. The store is a folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringjax import _native
from ringjax.config import Config
from ringjax.world.apart import WorldApart
from ringjax.world.key_value_store import KeyValueStore
from support.folder_store import FolderStore
from support.launch import environment

_SUM = _native.REDUCE_OPS["Sum"]


def run(
    folder: Path, lines: str, size: int, variables: Sequence[Mapping[str, str]] = ()
) -> list[str]:
    """Runs the lines in `size` processes, and returns what each has printed.

    Args:
        folder: an empty folder, for the store.
        variables: further environment variables for each process.
    """
    store = folder / "store"
    store.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "support.apart", str(rank), str(size), store],
            env=environment("apart", {"RINGJAX_START_TIMEOUT": "30", **more}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, more in enumerate(variables or [{}] * size)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(lines)
            process.stdin.close()
            process.stdin = None
        return [process.communicate(timeout=50)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def total(communicator: _native.Communicator, length: int = 1013) -> float:
    """Returns the sum of 1 + rank over the ranks of the communicator."""
    operand = np.full(length, 1.0 + communicator.rank, np.float32)
    result = np.empty_like(operand)
    op = _native.COLLECTIVES["allreduce"]
    communicator.execute(op, _SUM, [operand], [result], name="total")
    assert (result == result[0]).all()
    return float(result[0])


def gathered(communicator: _native.Communicator, value: int) -> list[int]:
    """Returns the values of all ranks of the communicator, in their order."""
    operand = np.full((1, 3), value, np.int64)
    result = np.empty((communicator.size, 3), np.int64)
    op, counts = _native.COLLECTIVES["allgather"], [1] * communicator.size
    communicator.execute(op, _SUM, [operand], [result], counts=counts, name="gathered")
    return [int(row[0]) for row in result]


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    config = Config.from_env()
    client = FolderStore(Path(sys.argv[3]))
    store = KeyValueStore(client, rank, size, "test", config.start_timeout)
    lines: dict[str, Any] = {"total": total, "gathered": gathered, "rank": rank}
    lines["world"] = world = WorldApart(store, config)
    try:
        exec(sys.stdin.read(), lines)
    finally:
        world.close()


if __name__ == "__main__":
    main()
