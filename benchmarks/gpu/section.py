"""The sections of check.py: reports of tables, failures and targets; ringjax's device.

A section is `python -m benchmarks.gpu.…`, which prints its tables if it is run alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.report import columns

RESULT = "RINGJAX_GPU_CHECK_RESULT"  # names the file of a report


@dataclass(frozen=True)
class Spread:
    """The median, the tenth and the ninetieth percentile of some samples."""

    median: float
    p10: float
    p90: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Spread(
            statistics.median(ordered),
            ordered[round(0.1 * last)],
            ordered[round(0.9 * last)],
            len(ordered),
        )

    def show(self, digits: int = 1) -> str:
        """Formats the median and the spread."""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f}–{self.p90:.{digits}f})"


class Report:
    """The results of one section. If `path` is None, nothing is written.

    The file is written after every addition, so that a section that crashes, or that is
    ended at its time limit, still shows its results.

    Attributes:
      tables: dicts of title, head, rows (of text cells) and notes.
      failures: descriptions of errors. Any failure makes the section fail.
      missed: targets that were not reached. A missed target does not make the section
        fail.
      values: numbers for the JSON file, by name.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.tables: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.missed: list[str] = []
        self.values: dict[str, Any] = {}
        self.write()

    def table(self, title: str, *head: str) -> None:
        """Begins a table, to which `row` and `note` add."""
        self.tables.append(
            {"title": title, "head": list(head), "rows": [], "notes": []}
        )
        self.write()

    def row(self, *cells: Any) -> list[str]:
        """Adds a row to the last table, and returns its cells."""
        row = [str(cell) for cell in cells]
        self.tables[-1]["rows"].append(row)
        self.write()
        return row

    def note(self, text: str) -> None:
        """Adds a sentence under the last table."""
        self.tables[-1]["notes"].append(text)
        self.write()

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.write()

    def value(self, name: str, value: Any) -> None:
        """Keeps a number, or another JSON value, for the file of all results."""
        self.values[name] = value
        self.write()

    def compare_with_target(
        self, what: str, value: float, target: float | None, unit: str = ""
    ) -> str:
        """Returns the cell of a target, and records a target that is missed.

        A positive target means "at least" this value. A negative target means "at most"
        its absolute value. If there is no target, the cell is empty.
        """
        if target is None:
            return ""
        reached = value >= target if target >= 0 else value <= -target
        text = f"{'≥' if target >= 0 else '≤'} {abs(target):g}{unit}"
        if not reached:
            self.missed.append(f"{what}: {value:.4g}{unit}, target {text}")
            self.write()
        return f"{text}: {'reached' if reached else 'missed'}"

    def write(self) -> None:
        """Writes the file, after a change of a row that `row` has returned."""
        if self._path is not None:
            kept = {k: v for k, v in vars(self).items() if not k.startswith("_")}
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(kept))
            # The rename is atomic, so no reader sees a part of the file.
            beside.replace(self._path)


def text_table(table: dict[str, Any]) -> str:
    rows = [table["head"], *table["rows"]]
    width = max(map(len, rows))
    text = columns([[*row, *[""] * (width - len(row))] for row in rows], left=width)
    return "\n".join([table["title"], text, *(f"* {n}" for n in table["notes"])])


def markdown_table(table: dict[str, Any]) -> str:
    lines = [f"### {table['title']}", ""]
    width = max(map(len, [table["head"], *table["rows"]]))
    for number, row in enumerate([table["head"], *table["rows"]]):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join([*cells, *[""] * (width - len(cells))]) + " |")
        if number == 0:
            lines.append("|" + " --- |" * width)
    lines += ["", *(f"* {note}" for note in table["notes"])]
    return "\n".join(lines).rstrip() + "\n"


@contextlib.contextmanager
def section() -> Iterator[Report]:
    """Yields the report of this process, and records an exception as a failure."""
    path = os.environ.get(RESULT)
    report = Report(Path(path) if path else None)
    try:
        yield report
    except BaseException as error:
        report.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        for table in report.tables:
            print(text_table(table) + "\n", flush=True)
    if report.failures:
        sys.exit(1)


def attempt(
    report: Report, what: str, action: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a part of a section. An exception is a failure, and other parts continue."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        report.fail(f"{what}: {type(error).__name__}: {str(error)[:600]}")
        return None


def device_communicator() -> Any:
    """Returns the world's device communicator; None if the CPU's transports are used.

    JAX makes the communicator when it first needs it.
    """
    from ringjax import runtime

    devices = getattr(runtime.current("gpu_check"), "devices", None)
    return devices.communicators.get(0, [None])[0] if devices is not None else None


def allreduce_stats() -> dict[str, float]:
    """Returns counters of allreduce of the communicator that JAX uses here."""
    from ringjax import runtime

    communicator = device_communicator() or runtime.communicator()
    stats = communicator.stats().get("allreduce", {})
    return {k: v for k, v in stats.items() if isinstance(v, int | float)}


def on_gpu() -> bool:
    """Returns whether JAX computes on a GPU here."""
    import jax

    return bool(jax.default_backend() == "gpu")


def require_device_path(report: Report) -> None:
    """Reports a failure if JAX uses a GPU but ringjax does not use NCCL."""
    if on_gpu() and device_communicator() is None:
        report.fail("JAX computes on the GPU, but ringjax has no device communicator")


def missing(*modules: str) -> list[str]:
    """Returns the modules that cannot be imported here."""

    def absent(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except (ImportError, ValueError):
            return True

    return [name for name in modules if absent(name)]
