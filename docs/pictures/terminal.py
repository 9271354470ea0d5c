"""Draws a terminal with `ringjax top` as an SVG, with the code of the command.

What it shows was recorded from a job of four ranks on two hosts: `top.json`.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

from ringjax.top.job_connection import parse_status
from ringjax.top.screen import picture

HERE = Path(__file__).resolve().parent
# rich's, without the fonts that it has browsers fetch.
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: \
full-width; }}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" \
clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Terminal:
    """Returns a console with 80 columns."""

    def __init__(self) -> None:
        self._console = Console(
            width=80,
            height=20,
            file=io.StringIO(),
            record=True,
            force_terminal=True,
            color_system="truecolor",
            legacy_windows=False,
        )

    def svg(self) -> str:
        """Returns the text of the SVG file."""
        seen = parse_status((HERE / "top.json").read_bytes())
        self._console.print(picture(seen))
        text = self._console.export_svg(
            title="", theme=SVG_EXPORT_THEME, code_format=_FORMAT, unique_id="top"
        )
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
