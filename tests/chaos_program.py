"""chaos_program.py FOLDER PAUSE: what each worker of a chaos test runs under ringrun.

It trains until FOLDER/stop exists, and appends one line for each step that it has
completed to FOLDER/<worker>.jsonl: which workers were in the sums, and a digest of the
parameters. Its pause, in seconds, stands for the rest of a training step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import chaos_model as model
import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from ringjax import runtime


class Trace:
    """The lines of this worker; each appears as a whole or not at all."""

    def __init__(self, folder: Path, worker: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(folder / f"{worker}.jsonl", flags, 0o600)

    def write(self, **line: Any) -> None:
        """With the time, which all processes of a machine have in common."""
        text = json.dumps({"t": round(time.monotonic(), 6), **line})
        os.write(self._fd, text.encode() + b"\n")


def main() -> None:
    """Trains for as long as it is let."""
    folder, pause = Path(sys.argv[1]), float(sys.argv[2])
    worker = int(os.environ["RINGJAX_WORKER"])
    trace = Trace(folder, worker)
    trace.write(event="started", pid=os.getpid())
    ringjax.init()
    tx = ringjax.allreduce_grads()
    params, opt = model.first()
    # Who takes part travels with the gradients, so that it is known exactly.
    extra = {"who": jnp.zeros((2, model.PLACES), jnp.float32)}
    state = ringjax.elastic.State(
        params=params, opt=opt, reduction=tx.init({**params, **extra}), step=0
    )

    @jax.jit
    def reduced(params: Any, reduction: Any, step: Any, worker: Any) -> Any:
        grads = model.gradients(params, worker, step)
        return tx.update({**grads, "who": model.marks(worker)}, reduction)

    def train_step(state: Any) -> list[int]:
        mean, state.reduction = reduced(
            state.params, state.reduction, jnp.int32(state.step), jnp.int32(worker)
        )
        marks = np.asarray(mean.pop("who"))
        state.params, state.opt = model.apply(state.params, state.opt, mean)
        jax.block_until_ready(state.params)
        return model.marked(marks)

    @ringjax.elastic.run(warm_up=train_step)
    def train(state: Any) -> int:
        trace.write(event="begins", step=state.step, epoch=runtime.generation().epoch)
        while True:
            who = train_step(state)
            # A short call beside the long one, and how all find the same end.
            note = np.zeros(2, np.float32)
            note[:] = ringjax.rank() == 0, (folder / "stop").exists()
            leaders, stop = np.asarray(ringjax.allreduce(note, op=ringjax.Sum))
            assert leaders <= 1, f"{leaders} ranks were rank 0 in step {state.step}"
            trace.write(
                step=state.step,
                who=who,
                digest=model.digest(state.params),
                epoch=runtime.generation().epoch,
                size=ringjax.size(),
                rank=ringjax.rank(),
            )
            state.step += 1
            if stop:
                return int(state.step)
            time.sleep(pause)
            state.commit()

    steps = train(state)
    trace.write(event="finished", steps=steps)
    print(f"finished after {steps} steps", flush=True)


main()
