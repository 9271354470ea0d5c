"""The training loop of the programs of the chaos tests, and its trace.

The loop trains until FOLDER/stop exists. After each step the loop appends a line to
FOLDER/<worker>.jsonl with the workers that contributed and a digest of the parameters.
PAUSE, in seconds, stands for the rest of a training step.
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
    """The trace of this worker. One write() per line: a kill rarely splits a line."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(folder / f"{WORKER}.jsonl", flags, 0o600)

    def write(self, **line: Any) -> None:
        """Appends a line with `t`, a time of the monotonic clock of the machine."""
        text = json.dumps({"t": round(time.monotonic(), 6), **line})
        os.write(self._fd, text.encode() + b"\n")


def exhaust_memory() -> None:
    """Allocates memory until the allocation raises MemoryError.

    The limit is 64 MiB above the mapped pages, because the native core and the
    interpreter need some memory to report the error.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    kept = []
    while True:
        kept.append(np.ones(1 << 20))


class Training:
    """The loop of a program with the arguments `FOLDER PAUSE [CHECKPOINTS]`."""

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
        """Trains until FOLDER/stop exists.

        Args:
            state: the elastic state with `params` and `step`.
            step: makes a training step and returns the workers that contributed.
            total: sums a small array over all ranks.
            digest: computes a hash of the parameters.
        """
        options = {}
        if self.checkpoints:
            checkpointer = ringjax.elastic.Checkpointer(self.checkpoints, every=20)
            options["checkpointer"] = checkpointer

        @ringjax.elastic.run(warm_up=step, **options)
        def train(state: Any) -> int:
            epoch = runtime.epoch_info().epoch
            self.trace.write(event="begins", step=state.step, epoch=epoch)
            while True:
                contributors = step(state)
                # A short call after the long call of the step, so that both routes run.
                # All ranks receive the same sum, so they stop after the same step.
                flags = np.zeros(2, np.float32)
                flags[:] = ringjax.rank() == 0, (self.folder / "stop").exists()
                leaders, stop = np.asarray(total(flags))
                assert leaders <= 1, f"{leaders} ranks were rank 0 in step {state.step}"
                self.trace.write(
                    step=state.step,
                    workers=contributors,
                    digest=digest(state.params),
                    epoch=runtime.epoch_info().epoch,
                    size=ringjax.size(),
                    rank=ringjax.rank(),
                )
                state.step += 1
                if stop:
                    return int(state.step)
                if (self.folder / f"full.{WORKER}").exists():
                    exhaust_memory()
                time.sleep(self.pause)
                state.commit()

        steps = train(state)
        self.trace.write(event="finished", steps=steps)
        print(f"finished after {steps} steps", flush=True)
