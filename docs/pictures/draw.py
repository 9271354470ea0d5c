"""Draws the pictures of the documentation: `python docs/pictures/draw.py`.

They are kept beside this file, because the pages are read without a build, too; a test
draws them again and compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from canvas import BLUE, FAINT, GREEN, ORANGE, RANKS, RED, Canvas  # noqa: E402
from chart import LINES, Panel  # noqa: E402
from terminal import Terminal  # noqa: E402


def gradient() -> Canvas:
    """Draws the way of a gradient: tracing, lowering, and each step."""
    c = Canvas.of(760, 330, "The journey of a gradient")
    stages = {
        "once, while tracing": [
            "tx.update(grads, state)",
            "plan of buckets:\norder of the backward pass",
            "one primitive:\nleaves and seq",
        ],
        "once, while compiling": [
            "one custom call, in place\nor START … DONE",
            "tied to the call before:\none order on all ranks",
            "XLA's program",
        ],
        "in every step, no Python": [
            "agree: 64 bytes,\nis it the same call?",
            "plan: the cheapest\nalgorithm, cached",
            "execute: reduce in\nXLA's own buffers",
        ],
    }
    for row, (title, boxes) in enumerate(stages.items()):
        y = 40 + 98 * row
        c.text(20, y - 10, title, fill=FAINT)
        for column, words in enumerate(boxes):
            x = 20 + 250 * column
            c.box(x, y, 215, 52, RANKS[row], words)
            if column:
                c.arrow(x - 34, y + 26, x - 3, y + 26)
        if row < 2:
            c.line(627, y + 53, 627, y + 72)
            c.line(627, y + 72, 215, y + 72)
            c.arrow(215, y + 72, 215, y + 96)
    c.text(740, 320, "the means, and seq + 1", anchor="end", fill=FAINT)
    return c


def shared_segment() -> Canvas:
    """Draws an allreduce of three ranks of one host through a shared segment."""
    c = Canvas.of(760, 360, "Three ranks reduce through a shared segment")
    for column, title in enumerate(
        ("own buffer", "shared segment", "sums in it", "own buffer")
    ):
        c.text(95 + 190 * column, 26, title, anchor="middle", fill=FAINT)
    moves = ("1  write what others add", "2  add up one's part", "3  fetch the rest")
    for column, move in enumerate(moves):
        c.text(190 + 190 * column, 346, move, anchor="middle")
    c.box(218, 38, 324, 286, "none", edge=FAINT, dashed=True, radius=8)
    for rank in range(3):
        y = 50 + 94 * rank
        c.text(16, y + 34, str(rank), fill=FAINT)
        for part in range(3):
            down = y + 26 * part
            c.box(40, down, 110, 22, RANKS[rank], f"part {part} of {rank}")
            mine = part == rank
            if not mine:
                c.box(230, down, 110, 22, RANKS[rank], f"part {part} of {rank}")
                c.arrow(152, down + 11, 226, down + 11)
            c.box(610, down, 110, 22, RED if mine else "#f3c3bf", f"sum of part {part}")
        c.box(420, y + 26, 110, 22, RED, f"sum of part {rank}")
        c.arrow(342, y + 37, 416, y + 37)
        c.arrow(532, y + 37, 606, y + 37)
    return c


def recovery() -> Canvas:
    """Draws a time line of four ranks: one is killed, and a replacement joins."""
    c = Canvas.of(760, 280, "Recovery as a line of time")
    c.text(20, 28, "rank", fill=FAINT)
    for rank in range(4):
        y = 44 + 48 * rank
        c.text(28, y + 22, str(rank))
        killed = rank == 2
        c.box(60, y, 150, 34, GREEN, "step 41")
        if killed:
            c.box(212, y, 58, 34, RED, "killed")
            c.box(400, y, 160, 34, BLUE, "imports, compiles")
            c.box(562, y, 44, 34, ORANGE, "state")
        else:
            c.box(212, y, 58, 34, GREEN, "42 …")
            c.box(272, y, 76, 34, ORANGE, "repair")
            c.box(350, y, 48, 34, GREEN, "… 42")
            c.box(400, y, 160, 34, GREEN, "43, 44, … as three")
            c.box(562, y, 44, 34, ORANGE, "pause")
        c.box(608, y, 136, 34, GREEN, "as four again")
    for x in (271, 399, 607):
        c.line(x, 36, x, 238, dashed=True)
    c.text(271, 256, "kill -9", anchor="middle")
    c.text(335, 272, "some tens of ms, same step, no compilation", anchor="middle")
    c.text(607, 256, "a commit: the newcomer joins", anchor="middle")
    return c


MICROSECONDS = dict(
    zip(
        (0.1, 1, 10, 100, 1e3, 1e4, 1e5, 1e6),
        ("0.1 µs", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"),
        strict=True,
    )
)
MEBIBYTES = {1 / 4: "¼ MiB", 1: "1 MiB", 4: "4 MiB", 16: "16 MiB", 64: "64 MiB"}
MEBIBYTES |= {256: "256 MiB", 1024: "1 GiB", 4096: "4 GiB"}


def ranks() -> Canvas:
    """Draws the measurements of benchmarks/by_ranks.py against the number of ranks."""
    c = Canvas.of(760, 600, "Time and memory against the ranks of one host")
    data = json.loads((HERE / "ranks.json").read_text())
    times, memory = data["times"], data["memory"]
    counts = sorted({point["ranks"] for point in times})
    names = list(dict.fromkeys(point["collective"] for point in times))
    sizes = list(dict.fromkeys(point["size"] for point in times))
    places = [(70 + 380 * (i % 2), 60 + 280 * (i // 2), 290, 190) for i in range(4)]
    for size, place in zip(sizes, places, strict=False):
        of_size = [point for point in times if point["size"] == size]
        seen = [p[k] for p in of_size for k in ("us", "limit_us") if k in p]
        panel = Panel(c, place, counts, ticks(MICROSECONDS, seen))
        panel.frame(f"{size}: time of a call")
        for name, colour in zip(names, LINES, strict=False):
            for key in ("limit_us", "us"):
                points = [p for p in of_size if p["collective"] == name and key in p]
                curve = {p["ranks"]: p[key] for p in points}
                panel.curve(curve, colour, dashed=key != "us")
    shown = {"shared MiB": ("shared by all", 50), "init MiB/rank": ("own, a rank", -10)}
    seen = [row[key] for row in memory for key in shown]
    panel = Panel(c, places[3], counts, ticks(MEBIBYTES, seen))
    panel.frame("memory after init")
    for (key, (name, below)), colour in zip(shown.items(), LINES, strict=False):
        panel.curve({row["ranks"]: row[key] for row in memory}, colour)
        x, y = panel.at(counts[-1], memory[-1][key])
        c.text(x, y + below, name, anchor="end", fill=colour)
    for i, (name, colour) in enumerate(zip(names, LINES, strict=False)):
        c.text(20 + 102 * i, 580, name, fill=colour)
    c.text(740, 580, "dashed: limit of the memory", anchor="end", fill=FAINT)
    return c


def ticks(named: Mapping[float, str], seen: Sequence[float]) -> dict[float, str]:
    """Returns the ticks that enclose all values; a tenth of a tick may stick out."""
    low = max(t for t in named if t <= 1.1 * min(seen) or t == min(named))
    high = min(t for t in named if t >= max(seen) / 1.1 or t == max(named))
    return {t: name for t, name in named.items() if low <= t <= high}


PICTURES: dict[str, Callable[[], Canvas | Terminal]] = {
    "gradient": gradient,
    "shared-segment": shared_segment,
    "recovery": recovery,
    "ranks": ranks,
    "top": Terminal,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg())
