"""A canvas that writes the few SVG shapes of the pictures in this folder.

Colours stand on a card of their own, so that a picture is readable on a light page and
on a dark one. The standard library is enough.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

INK, FAINT, CARD = "#1f2933", "#7b8794", "#fbfbf9"
BLUE, GREEN, ORANGE, RED = "#9fc5f0", "#a8d8b0", "#f5cf8e", "#e88b84"
RANKS = (BLUE, GREEN, ORANGE, "#cdb8e8")


@dataclass(frozen=True)
class Canvas:
    """A picture of fixed size; shapes are drawn in the order of the calls."""

    width: int
    height: int
    root: ET.Element

    @classmethod
    def of(cls, width: int, height: int, title: str) -> Canvas:
        """Makes an empty card. Screen readers read `title` aloud."""
        box = f"0 0 {width} {height}"
        root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=box)
        root.attrib |= {"role": "img", "font-family": "system-ui, sans-serif"}
        root.attrib |= {"width": str(width), "height": str(height), "font-size": "13"}
        ET.SubElement(root, "title").text = title
        marker = ET.SubElement(ET.SubElement(root, "defs"), "marker", id="tip")
        marker.attrib |= {"viewBox": "0 0 8 8", "refX": "7", "refY": "4"}
        marker.attrib |= {"markerWidth": "7", "markerHeight": "7", "orient": "auto"}
        ET.SubElement(marker, "path", d="M0 0L8 4L0 8z", fill=INK)
        canvas = cls(width, height, root)
        canvas.box(0, 0, width, height, CARD, edge="none", radius=10)
        return canvas

    def _add(self, kind: str, **attributes: object) -> ET.Element:
        named = {k.replace("_", "-"): str(v) for k, v in attributes.items()}
        return ET.SubElement(self.root, kind, named)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        *,
        edge: str = INK,
        radius: float = 4,
        dashed: bool = False,
    ) -> None:
        """A rectangle, with lines of text in its middle."""
        size = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
        dash = {"stroke_dasharray": "5 4"} if dashed else {}
        self._add("rect", **size, fill=fill, stroke=edge, **dash)
        lines = text.splitlines()
        for number, line in enumerate(lines):
            down = y + height / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, down, line, anchor="middle")

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK
    ) -> None:
        """Writes one line of text with its baseline at `y`."""
        made = self._add("text", x=x, y=y, text_anchor=anchor, fill=fill)
        made.text = words

    def line(
        self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False
    ) -> None:
        """A line without a tip."""
        dash = {"stroke_dasharray": "5 4"} if dashed else {}
        ends = {"x1": x, "y1": y, "x2": to_x, "y2": to_y}
        self._add("line", **ends, stroke=FAINT, **dash)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a tip at its end."""
        ends = {"x1": x, "y1": y, "x2": to_x, "y2": to_y}
        self._add("line", **ends, stroke=INK, marker_end="url(#tip)")

    def path(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        *,
        dashed: bool = False,
        marked: bool = False,
    ) -> None:
        """A line through points, with a dot on each if they are marked."""
        dash = {"stroke_dasharray": "4 4"} if dashed else {}
        words = " ".join(f"{x},{y}" for x, y in points)
        width = 1 if dashed else 1.8
        style = {"fill": "none", "stroke": colour, "stroke_width": width, **dash}
        self._add("polyline", points=words, **style)
        for x, y in points if marked else ():
            self._add("circle", cx=x, cy=y, r=2.6, fill=colour)

    def svg(self) -> str:
        """The file's text."""
        ET.indent(self.root)
        return ET.tostring(self.root, encoding="unicode") + "\n"
