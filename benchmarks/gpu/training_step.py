"""The time that the allreduce of one rank adds to a step, compared with psum.

With one rank nothing is sent. The added time is ringjax's own work, and the loss of
optimizations that XLA cannot make across its calls. All variants are compiled first and
then take turns.
Tensor fusion is a setting of the world, so each mode has a run of its own, with its own
"no allreduce".
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.section import (
    Report,
    Spread,
    attempt,
    on_gpu,
    require_device_path,
    section,
)

NONE = "no allreduce"
VARIANTS = {
    "hybrid": (NONE, "overlap=False", "overlap=True", "psum"),
    "pack": (NONE, "overlap=False", "overlap=True"),
    "group": (NONE, "overlap=False", "overlap=True"),
}
TARGET = -2.0  # most per cent that the allreduce may add
FEWEST = 5  # least number of rounds
CHUNK = 4  # steps that are queued before a wait


@dataclass
class Variant:
    """A compiled step with its own parameters. `samples` are seconds of a step."""

    name: str
    step: Any
    held: Any
    plan: str = "-"
    compile_seconds: float = 0.0
    reductions: int = 0
    samples: list[float] = field(default_factory=list)
    loss: float = math.nan

    def run(self, batch: Any, steps: int) -> None:
        """Runs some steps, and then waits for all of these steps."""
        import jax

        loss: Any = None
        for _ in range(steps):
            *self.held, loss = self.step(*self.held, batch)
        self.loss = float(jax.block_until_ready((loss, self.held))[0])


def make(name: str, loss_of: Any, parameters: Any, batch: Any) -> Variant:
    """Compiles the training step of a variant."""
    import jax
    import jax.numpy as jnp
    import optax

    import ringjax

    chain = [optax.sgd(1e-3, 0.9)]
    if name.startswith("overlap="):
        chain.insert(0, ringjax.allreduce_grads(overlap=name == "overlap=True"))
    tx = optax.chain(*chain)

    def step(parameters: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(parameters, batch)
        if name == "psum":
            grads = jax.lax.pmean(grads, "ranks")
        updates, state = tx.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    if name == "psum":
        mesh = jax.make_mesh((1,), ("ranks",), devices=jax.local_devices()[:1])
        spec = jax.sharding.PartitionSpec()
        step = jax.shard_map(
            step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    # The step donates these, so it needs a copy.
    own = jax.tree.map(jnp.copy, parameters)
    held = [own, tx.init(own)]
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*held, batch).compile()
    variant = Variant(name, compiled, held)
    variant.compile_seconds = time.perf_counter() - started
    text = compiled.as_text() or ""
    variant.reductions = text.count(" all-reduce(") + text.count(" all-reduce-start(")
    variant.plan = _plan(compiled)
    return variant


def _plan(compiled: Any) -> str:
    """Returns the memory that XLA has planned, in MB, without ringjax's buffer."""
    try:
        sizes = compiled.memory_analysis()
        total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        total += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
        return f"{total / 1e6:.0f}"
    except Exception as error:  # some backends do not report the memory
        return f"not known ({type(error).__name__})"


def peak() -> str:
    """Returns the most memory that JAX has ever held in this process, in MB."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    found = stats.get("peak_bytes_in_use")
    return f"{found / 1e6:.0f}" if found else "-"


def take_turns(
    variants: Sequence[Variant], batch: Any, rounds: int, deadline: float
) -> int:
    """Measures all variants, in an order that changes from round to round.

    Returns:
      The number of rounds: fewer than `rounds` if the deadline has passed.
    """
    for number in range(rounds):
        if number >= FEWEST and time.monotonic() > deadline:
            return number
        shift = number % len(variants)
        for variant in [*variants[shift:], *variants[:shift]]:
            started = time.perf_counter()
            variant.run(batch, CHUNK)
            variant.samples.append((time.perf_counter() - started) / CHUNK)
    return rounds


def show(report: Report, variants: Sequence[Variant], fusion: str, what: str) -> None:
    base = next((v for v in variants if v.name == NONE), None)
    for variant in variants:
        millis = Spread.of([1e3 * s for s in variant.samples])
        added, target = "-", ""
        if base is not None and variant is not base:
            ratios = [
                100 * (s / b - 1)
                for s, b in zip(variant.samples, base.samples, strict=True)
            ]
            spread = Spread.of(ratios)
            added = spread.show(2)
            name = f"{what}, {fusion}, {variant.name}"
            report.value(f"added_percent/{name}", spread.median)
            counts = fusion == "hybrid" and what == "resnet50" and on_gpu()
            if counts and variant.name != "psum":
                target = report.compare_with_target(name, spread.median, TARGET, " %")
        report.row(
            *(variant.name, millis.show(2), added, variant.plan, variant.reductions),
            *(f"{variant.compile_seconds:.0f}", f"{variant.loss:.4g}", target),
        )
        if not math.isfinite(variant.loss):
            report.fail(f"{variant.name}: the loss is {variant.loss}")


def arguments(parser: argparse.ArgumentParser, model: str) -> None:
    """Adds the options for the model."""
    parser.add_argument("--model", choices=("resnet50", "mlp"), default=model)
    parser.add_argument("--batch", type=int, help="64 images, or 4096 rows")
    parser.add_argument("--layers", type=int, default=24, help="of the mlp")
    parser.add_argument("--width", type=int, default=4096, help="of the mlp")


def model_of(options: argparse.Namespace) -> Any:
    batch = options.batch or (64 if options.model == "resnet50" else 4096)
    return models.build(options.model, batch, options.layers, options.width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments(parser, "resnet50")
    parser.add_argument("--fusion", choices=VARIANTS, default="hybrid")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600.0, help="then it ends")
    options = parser.parse_args()
    os.environ["RINGJAX_FUSION"] = options.fusion
    deadline = time.monotonic() + options.seconds
    with section() as report:
        import ringjax

        ringjax.init()
        report.table(
            f"Training step of {options.model}, one rank, fusion {options.fusion}",
            *("variant", "ms a step", "added %", "memory planned, MB"),
            *("all-reduce in HLO", "compiled in s", "last loss", "target"),
        )
        parameters, batch, loss_of = model_of(options)
        variants = []
        for name in VARIANTS[options.fusion]:
            if time.monotonic() > deadline - 0.3 * options.seconds:
                report.fail(f"{name}: not run, compiling the others took too long")
                continue
            made = attempt(report, name, make, name, loss_of, parameters, batch)
            if made:
                attempt(report, name, made.run, batch, 3)
            if made and not math.isnan(made.loss):
                variants.append(made)
                print(f"{name}: {made.compile_seconds:.1f} s, peak {peak()} MB")
        rounds = take_turns(variants, batch, options.rounds, deadline)
        show(report, variants, options.fusion, options.model)
        report.note(
            f"median (p10–p90) of {rounds} rounds of {CHUNK} steps; added: "
            f"against “{NONE}” of the same round; JAX's peak of all: {peak()} MB"
        )
        if on_gpu():
            require_device_path(report)


if __name__ == "__main__":
    main()
