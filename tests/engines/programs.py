"""Functions that the workers of these tests run.

Each function imports what it needs, because it is pickled without this module.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any


def allreduce(scale: float = 1.0) -> tuple[int, int, int, float]:
    import numpy as np

    import ringjax

    ringjax.init()
    total = ringjax.allreduce(np.full(3, scale * (ringjax.rank() + 1)), op=ringjax.Sum)
    return ringjax.rank(), ringjax.size(), ringjax.local_rank(), float(total[0])


def fails(rank: int, how: str) -> None:
    """Raises or is killed on `rank` while the other ranks wait for this rank."""
    import ringjax

    ringjax.init()
    if ringjax.rank() == rank:
        if how == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), 9)
    ringjax.barrier()


def broken_warm_up(state: Any) -> None:
    raise ValueError("boom")


def train(
    folder: str, steps: int, pause: float = 0.02, warm_up: Any = None
) -> dict[str, Any]:
    """Trains elastically, until step `steps` or until the file `stop` is in the folder.

    At each change of its size, a process appends its rank, the size and the time to a
    file in the folder. The name of the file is the id of the process.
    """
    import numpy as np

    import ringjax

    ringjax.init()
    me = Path(folder, str(os.getpid()))
    sizes: list[tuple[int, int, float]] = []

    @ringjax.elastic.run(warm_up=warm_up)
    def loop(state: Any) -> None:
        while state.step < steps:
            mine = np.array([1.0, Path(folder, "stop").exists()])
            total = ringjax.allreduce(mine, op=ringjax.Sum)
            size = int(total[0])
            state.step = steps if total[1] else state.step + 1
            if not sizes or sizes[-1][1] != size:
                sizes.append((state.step, size, time.time()))
                with me.open("a") as file:
                    file.write(f"{ringjax.rank()} {size} {time.time()}\n")
            time.sleep(pause)
            state.commit()

    loop(ringjax.elastic.State(step=0))
    return {"rank": ringjax.rank(), "pid": os.getpid(), "sizes": sizes}


def train_noting_the_start(folder: str) -> dict[str, Any]:
    """Trains like `train`, and writes a file in FOLDER/started before it does."""
    started = Path(folder, "started")
    started.mkdir(exist_ok=True)
    (started / str(os.getpid())).touch()
    return train(folder, 10**6)


def wait_for_start(folder: Path, count: int, seconds: float = 60) -> set[str]:
    """Waits until `count` processes have started; returns their ids."""
    deadline = time.monotonic() + seconds
    started = folder / "started"
    while time.monotonic() < deadline:
        found = {f.name for f in started.iterdir()} if started.exists() else set()
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{len(found)} processes and not {count} have started")


def wait_for_sizes(folder: Path, size: int, count: int, seconds: float = 60) -> None:
    """Waits until `count` processes have reported that the job has `size` ranks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        texts = [
            f.read_text().split("\n")
            for f in folder.iterdir()
            if f.name.isdigit() and Path("/proc", f.name).exists()
        ]
        last = [lines[-2].split()[1] for lines in texts if len(lines) > 1]
        if last.count(str(size)) >= count:
            return
        time.sleep(0.05)
    raise TimeoutError(f"no {count} processes in a job of {size}: {texts}")


def train_until(folder: str) -> list[tuple[int, float]]:
    """Trains elastically until the file `stop` is in the folder.

    Returns the sizes of the job and the times of their changes, which are also written
    to files as in `train`.
    """
    import numpy as np

    import ringjax

    ringjax.init()
    sizes: list[tuple[int, float]] = []

    @ringjax.elastic.run
    def loop(state: Any) -> None:
        while not state.ends:
            mine = np.array([1, Path(folder, "stop").exists()])
            size, ends = ringjax.allreduce(mine, op=ringjax.Sum).tolist()
            if not sizes or sizes[-1][0] != size:
                sizes.append((size, time.time()))
                with Path(folder, str(os.getpid())).open("a") as file:
                    file.write(f"{ringjax.rank()} {size} {sizes[-1][1]}\n")
            time.sleep(0.01)
            state.ends = bool(ends)
            state.commit()

    loop(ringjax.elastic.State(ends=False))
    return sizes


def next_steps(folder: Path, since: float) -> list[float]:
    """Returns the seconds to the next step of each process whose job became smaller."""
    found = []
    for file in folder.glob("[0-9]*"):
        lines = [line.split() for line in file.read_text().splitlines()]
        pairs = itertools.pairwise(lines)
        found += [
            float(b[2]) - since
            for a, b in pairs
            if float(b[2]) > since > float(a[2]) and int(b[1]) < int(a[1])
        ]
    return found
