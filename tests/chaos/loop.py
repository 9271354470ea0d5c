"""The training loop of the programs of the chaos tests, and its trace.

The loop trains until FOLDER/stop exists. After each step it appends a line to
FOLDER/<worker>.jsonl with the workers that contributed and a digest of the parameters.
Its pause, in seconds, stands for the rest of a training step.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ringjax
from ringjax import runtime

WORKER = int(os.environ.get("RINGJAX_WORKER", "0"))


class Trace:
    """The trace of this worker. Each line is written as a whole or not at all."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(folder / f"{WORKER}.jsonl", flags, 0o600)

    def write(self, **line: Any) -> None:
        """Writes a line with the time of the machine's monotonic clock."""
        text = json.dumps({"t": round(time.monotonic(), 6), **line})
        os.write(self._fd, text.encode() + b"\n")


def exhaust() -> None:
    """Takes more memory than this process may have.

    Raises:
        MemoryError: as soon as there is no more.
    """
    # Leave some memory above the mapped pages, which core and interpreter need.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    kept = []
    while True:
        kept.append(np.ones(1 << 20))


class Training:
    """The loop of a program with the words `FOLDER PAUSE [CHECKPOINTS]`."""

    def __init__(self) -> None:
        self.folder, self.pause = Path(sys.argv[1]), float(sys.argv[2])
        self.checkpoints = sys.argv[3] if len(sys.argv) > 3 else ""
        self.trace = Trace(self.folder)
        self.trace.write(event="started", pid=os.getpid())
        ringjax.init()

    def run(
        self,
        state: Any,
        step: Callable[[Any], list[int]],
        total: Callable[[Any], Any],
        digest: Callable[[Any], str],
    ) -> None:
        """Makes steps until FOLDER/stop exists.

        Args:
            state: the elastic state with `params` and `step`.
            step: makes a training step and returns the workers that contributed.
            total: sums a small array over all ranks.
            digest: computes a hash of the parameters.
        """
        more = {}
        if self.checkpoints:
            keeper = ringjax.elastic.Checkpointer(self.checkpoints, every=20)
            more["checkpointer"] = keeper

        @ringjax.elastic.run(warm_up=step, **more)
        def train(state: Any) -> int:
            epoch = runtime.epoch_info().epoch
            self.trace.write(event="begins", step=state.step, epoch=epoch)
            while True:
                who = step(state)
                # A short call beside the long one. Its sum also decides on all ranks
                # together whether to end.
                note = np.zeros(2, np.float32)
                note[:] = ringjax.rank() == 0, (self.folder / "stop").exists()
                leaders, stop = np.asarray(total(note))
                assert leaders <= 1, f"{leaders} ranks were rank 0 in step {state.step}"
                self.trace.write(
                    step=state.step,
                    who=who,
                    digest=digest(state.params),
                    epoch=runtime.epoch_info().epoch,
                    size=ringjax.size(),
                    rank=ringjax.rank(),
                )
                state.step += 1
                if stop:
                    return int(state.step)
                if (self.folder / f"full.{WORKER}").exists():
                    exhaust()
                time.sleep(self.pause)
                state.commit()

        steps = train(state)
        self.trace.write(event="finished", steps=steps)
        print(f"finished after {steps} steps", flush=True)
