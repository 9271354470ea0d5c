"""A panel with two logarithmic axes on a canvas, for lines of measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canvas import FAINT, Canvas

LINES = ("#2f6fb5", "#2e8b57", "#c97f00", "#c0392b", "#7d5ba6")


@dataclass(frozen=True)
class Panel:
    """A part of a canvas: where it is, what its axes span, how ticks are named.

    Attributes:
      canvas: to draw on.
      place: x, y, width and height of the plot; labels are to the left and below.
      across: the values of the horizontal axis that have a tick, in rising order.
      up: the values of the vertical axis, with their names.
    """

    canvas: Canvas
    place: tuple[float, float, float, float]
    across: Sequence[float]
    up: Mapping[float, str]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Returns the place of a point on the canvas."""
        left, top, width, height = self.place

        def share(value: float, ends: Sequence[float]) -> float:
            low, high = math.log(min(ends)), math.log(max(ends))
            return (math.log(value) - low) / (high - low)

        right = left + width * share(x, self.across)
        return round(right, 1), round(top + height * (1 - share(y, [*self.up])), 1)

    def frame(self, title: str) -> None:
        """The title, and a faint line for each tick."""
        left, top, width, height = self.place
        self.canvas.text(left, top - 12, title)
        for value, name in self.up.items():
            _, y = self.at(self.across[0], value)
            self.canvas.line(left, y, left + width, y)
            self.canvas.text(left - 6, y + 4, name, anchor="end", fill=FAINT)
        for value in self.across:
            x, _ = self.at(value, min(self.up))
            y = top + height + 18
            self.canvas.text(x, y, f"{value:g}", anchor="middle", fill=FAINT)

    def curve(
        self, points: Mapping[float, float], colour: str, *, dashed: bool = False
    ) -> None:
        """A line through points, which are marked unless it is dashed."""
        places = [self.at(x, y) for x, y in sorted(points.items())]
        self.canvas.path(places, colour, dashed=dashed, marked=not dashed)
