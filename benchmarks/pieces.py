"""Steps in pieces next to steps with allreduce_grads: `python -m benchmarks.pieces`.

All ranks make some steps of each kind in turns, so that other work on the machine
disturbs all kinds alike. The table shows medians of the slowest rank, and their ratios
to a step with allreduce_grads. Each rank has one thread of XLA.

With ``--slow``, rank 0 is stopped for half of the time. The ideal is the time in which
the ranks would make a step without any loss: pieces / (sum of the speeds).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import ringjax
from benchmarks.harness.report import columns

BATCH, LENGTH, LETTERS = 96, 64, 90
Make = Callable[[], tuple[Any, Callable[[Any, Any, Any], Any], Callable[[Any], Any]]]


class Digits(nn.Module):
    """The network of examples/jax_digits.py."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2)(x))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class CharLm(nn.Module):
    """A transformer like that of examples/jax_char_lm.py."""

    width: int = 96

    @nn.compact
    def __call__(self, tokens):
        positions = nn.Embed(LENGTH, self.width)(np.arange(tokens.shape[-1]))
        x = nn.Embed(LETTERS, self.width)(tokens) + positions
        mask = nn.make_causal_mask(np.ones(tokens.shape[-1]))
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y, mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(x)))
        return nn.Dense(LETTERS)(nn.LayerNorm()(x))


def rows_of(model: str, start: int, count: int) -> tuple[Any, Any]:
    """Returns inputs and targets of some samples of the global batch."""
    rng = np.random.default_rng(start)
    if model == "digits":
        images = rng.normal(size=(count, 8, 8, 1)).astype("f4")
        return images, rng.integers(0, 10, count).astype("i4")
    tokens = rng.integers(0, LETTERS, (count, LENGTH + 1)).astype("i4")
    return tokens[:, :-1], tokens[:, 1:]


def steps_of(model: str, pieces: int, one_program: bool) -> Callable[[], Any]:
    """Returns a function that makes a step; 0 pieces are allreduce_grads."""
    net = Digits() if model == "digits" else CharLm()
    batch = BATCH if model == "digits" else BATCH // 4

    def loss_of(params: Any, data: Any, key: Any = None) -> Any:
        logits = net.apply(params, data[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, data[1])
        return losses.mean()

    params = net.init(jax.random.key(0), rows_of(model, 0, 1)[0])
    if not pieces:
        return plain_steps(loss_of, params, model, batch)
    size = batch // pieces
    data = [rows_of(model, piece, size) for piece in range(pieces)]
    step = ringjax.pieces.step(
        loss_of, optax.adam(1e-3), pieces, one_program=one_program, audit=0
    )
    load = lambda number, piece: data[piece]  # noqa: E731
    held = [step.init(params, load)]

    def one() -> Any:
        held[0], loss = step(held[0], load)
        return loss

    return one


def plain_steps(loss_of: Any, params: Any, model: str, batch: int) -> Callable[[], Any]:
    tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-3))
    data = rows_of(model, ringjax.rank(), batch // ringjax.size())

    @jax.jit
    def step(params: Any, state: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, data)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    held = [(params, tx.init(params))]

    def one() -> Any:
        *state, loss = step(*held[0], data)
        held[0] = state
        return loss

    return one


@contextmanager
def half_stopped() -> Iterator[None]:
    """Stops rank 0 for half of the time, by another process."""
    if ringjax.rank():
        yield
        return
    program = (
        "import os, signal, time\n"
        "while True:\n"
        f"  os.kill({os.getpid()}, signal.SIGSTOP); time.sleep(0.002)\n"
        f"  os.kill({os.getpid()}, signal.SIGCONT); time.sleep(0.002)\n"
    )
    stopper = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        stopper.kill()
        stopper.wait()
        os.kill(os.getpid(), signal.SIGCONT)


def measured(options: argparse.Namespace, steps: dict[Any, Any]) -> dict[Any, float]:
    """Returns the seconds of a step of each kind: the median of the slowest rank."""
    times: dict[Any, list[float]] = {kind: [] for kind in steps}
    for turn in range(options.turns + 2):
        for kind, step in steps.items():
            for _ in range(options.steps // 2):
                step()  # the shares follow the speeds again after the other kinds
            ringjax.barrier()
            began = time.perf_counter()
            for _ in range(options.steps):
                loss = step()
            jax.block_until_ready(loss)
            if turn > 1:
                times[kind].append((time.perf_counter() - began) / options.steps)
    medians = [np.float32(statistics.median(each)) for each in times.values()]
    slowest = ringjax.allreduce(medians, ringjax.Max)
    return dict(zip(steps, map(float, slowest), strict=True))


def rank_main(options: argparse.Namespace) -> None:
    ringjax.init()
    for model in options.models:
        kinds = [(0, False), *((pieces, False) for pieces in options.pieces)]
        if model == "char_lm":  # loops are slow for the convolutions of the other one
            kinds += [(pieces, True) for pieces in options.pieces]
        steps = {kind: steps_of(model, *kind) for kind in kinds}
        times, slow = measured(options, steps), {}
        if options.slow:
            with half_stopped():
                slow = measured(options, steps)
        if ringjax.rank() == 0:
            show(model, times, slow)


def show(model: str, times: dict[Any, float], slow: dict[Any, float]) -> None:
    ranks, base = ringjax.size(), times[0, False]
    head = [f"{model}, {ranks} ranks", "ms", "/ allreduce_grads"]
    lines = [head + ["rank 0 at half speed", "/ ideal"] * bool(slow)]
    for (pieces, whole), seconds in times.items():
        name = f"{pieces} pieces{', one program' * whole}"
        line = [name if pieces else "allreduce_grads"]
        line += [f"{1e3 * seconds:.2f}", f"{seconds / base:.2f}"]
        if slow:
            ideal = seconds * ranks / (ranks - 0.5)
            slowed = slow[pieces, whole]
            line += [f"{1e3 * slowed:.2f}", f"{slowed / ideal:.2f}"]
        lines.append(line)
    print(columns(lines), flush=True)


def main() -> None:
    p = argparse.ArgumentParser(prog="benchmarks.pieces")
    p.add_argument("-np", dest="ranks", type=int, nargs="+", default=[2, 4])
    p.add_argument("--models", nargs="+", default=["digits", "char_lm"])
    p.add_argument("--pieces", type=int, nargs="+", default=[4, 12])
    p.add_argument("--turns", type=int, default=15)
    p.add_argument("--steps", type=int, default=20, help="steps of each kind in a turn")
    p.add_argument("--slow", action="store_true", help="hold rank 0 to half of a core")
    options = p.parse_args()
    if "RINGJAX_SIZE" in os.environ:
        rank_main(options)
        return
    for ranks in options.ranks:
        words = ["-m", "ringjax.run", "-np", str(ranks), "--same-bits"]
        me = [sys.executable, "-m", "benchmarks.pieces", *sys.argv[1:]]
        subprocess.run([sys.executable, *words, *me], check=True)


if __name__ == "__main__":
    main()
