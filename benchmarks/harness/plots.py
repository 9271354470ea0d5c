"""Plots of the results of allreduce.py; only this module needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Lines = dict[str, list[tuple[int, float]]]


def missing() -> str | None:
    """Returns the text of an error if plots cannot be drawn, else None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return None


def lines(rows: Sequence[Row], across: str) -> Lines:
    """Returns for every peer the points (row[across], µs) of its fastest variant."""
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        key = (row["peer"], row[across])
        best[key] = min(best.get(key, float("inf")), row["us_median"])
    found: Lines = {}
    for (peer, place), time in sorted(best.items()):
        found.setdefault(peer, []).append((place, time))
    return found


def draw(rows: Sequence[Row], path: Path) -> list[Path]:
    """Draws time against bytes, and against tensor counts; returns the files.

    Each number of ranks and each dtype has a panel.
    """
    beside = path.with_name(f"{path.stem}-counts{path.suffix}")
    sizes = [r for r in rows if r["kind"] == "arrays" and not r["counts"]]
    counts = [r for r in rows if r["counts"]]
    written = []
    for file, kept, across, label in (
        (path, sizes, "size", "bytes"),
        (beside, counts, "tensors", "tensors, of the same bytes in total"),
    ):
        if kept:
            _figure(kept, across, label, file)
            written.append(file)
    return written


def _figure(rows: Sequence[Row], across: str, label: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(r["ranks"], r["dtype"]) for r in rows})
    width = 6 * len(panels)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(width, 4.5), squeeze=False, sharey=True
    )
    for axis, (ranks, dtype) in zip(axes[0], panels, strict=True):
        here = [r for r in rows if (r["ranks"], r["dtype"]) == (ranks, dtype)]
        for peer, points in lines(here, across).items():
            style = {"color": "black", "linestyle": "--"} if peer == "limit" else {}
            axis.plot(*zip(*points, strict=True), marker="o", label=peer, **style)
        axis.set(title=f"{ranks} ranks, {dtype}", xscale="log", yscale="log")
        axis.set(xlabel=label, ylabel="µs, median of the fastest variant")
        axis.grid(True, alpha=0.3)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
