"""How much of the communication is hidden behind the backward pass, from the profiler.

One rank with RINGJAX_FUSION=pack, so that every START really runs kernels on the
communication stream. If the profile does not show the share, the table says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu import trace, training_step
from benchmarks.gpu.section import Report, attempt, on_gpu, require_device_path, section

STEPS = 5
TARGET = 90.0  # least hidden share in per cent


def record(variant: training_step.Variant, batch: Any, folder: Path) -> None:
    """Records a profile of some steps after a warm-up."""
    import jax

    variant.run(batch, 3)
    with jax.profiler.trace(str(folder)):
        variant.run(batch, STEPS)


def show(report: Report, name: str, folder: Path) -> None:
    """Makes a row with the hidden share, or with the reason why it is unknown."""
    try:
        found = trace.overlap(trace.read(trace.find(folder)))
    except trace.TraceError as error:
        report.row(name, "not known", "", "", "", str(error)[:300])
        return
    share = 100 * found.hidden
    target = ""
    if name == "overlap=True":
        target = report.compare_with_target(f"hidden, {name}", share, TARGET, " %")
    report.row(
        *(name, f"{share:.1f} %", f"{found.communication / 1e3 / STEPS:.3f}"),
        *(f"{found.computation / 1e3 / STEPS:.3f}", f"{found.kernels / STEPS:g}"),
        f"on {', '.join(found.streams)}; {target}",
    )
    report.value(f"hidden_percent/{name}", share)


def main() -> None:
    """Measures the overlapped step and, as a control, the step without overlap."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    training_step.arguments(parser, "mlp")
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    os.environ["RINGJAX_FUSION"] = "pack"
    # A captured graph may appear in the profile as one piece.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    shutil.rmtree(options.work, ignore_errors=True)
    with section() as report:
        import ringjax

        ringjax.init()
        report.table(
            f"Timeline of {options.model}, one rank, everything packed",
            *("variant", "hidden", "allreduce ms a step", "other kernels ms a step"),
            *("kernels a step", "remarks"),
        )
        report.note(
            "hidden: share of the time of rj_pack, rj_unpack and NCCL kernels during "
            "which a kernel of another stream runs too"
        )
        parameters, batch, loss_of = training_step.model_of(options)
        for name in ("overlap=True", "overlap=False"):
            folder = options.work / name.replace("=", "-")
            made = attempt(
                report, name, training_step.make, name, loss_of, parameters, batch
            )
            if made:
                attempt(report, name, record, made, batch, folder)
                attempt(report, name, show, report, name, folder)
        if on_gpu():
            require_device_path(report)


if __name__ == "__main__":
    main()
