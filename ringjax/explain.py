"""The command `ringjax explain ERROR`: prints help for an error, without the network.

The help is a part of docs/troubleshooting.md, which each installation contains: the
section of an exception, or the list items of this section whose words the error has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringjax import errors, stdout

_PAGE = "troubleshooting.md"
_SECTION = re.compile(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)")
_POINT = re.compile(r"(?ms)^- (.*?)(?=^- |^\S|\Z)")
_WORDS = re.compile(r"\*\*`([^`]+)`\*\*")
_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)", re.DOTALL)


def _page() -> str:
    """Returns the text of docs/troubleshooting.md, installed or from a checkout."""
    installed = Path(__file__).with_name(_PAGE)
    checkout = Path(__file__).parents[1] / "docs" / _PAGE
    return (installed if installed.exists() else checkout).read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """Converts Markdown for a terminal: "text (docs/page.md)" for a link."""
    return _LINK.sub(r"\1 (docs/\2)", text).replace("**", "").strip()


def _points(body: str, line: str) -> Iterator[str]:
    """Yields those list items of a section whose quoted words all occur in `line`."""
    for point in _POINT.findall(body):
        words = _WORDS.findall(point.partition(":")[0] or point)
        if words and all(word in line for word in words):
            yield f"- {point.strip()}"


def explain(line: str) -> str:
    """Returns the sections or list items of docs/troubleshooting.md about an error.

    `line` is the name of an exception, a heading of the page, or the text of an error.
    Returns "" if the page has nothing about the error.

    Example:
        >>> explain("OutOfDescriptors").splitlines()[0]
        'OutOfDescriptors'
        >>> explain("allreduce 'x': rank 1 was killed by signal 9").splitlines()[0]
        'PeerLost'
    """
    sections = _SECTION.findall(_page())
    named = [(t, b) for t, b in sections if re.search(rf"(?i)\b{t}\b", line)]
    found = [
        (t, "\n".join(points)) for t, b in sections if (points := [*_points(b, line)])
    ]
    # The error of a compiled step begins with a status code.
    status = re.search(r"(?s)[A-Z_]+: [^[]*RINGJAX\[.*", line)
    if not (named or found) and status and (ours := errors.from_program(status[0])):
        named = [(t, b) for t, b in sections if t == type(ours).__name__]
    if found:
        kinds = {title for title, _ in named}
        found = [one for one in found if one[0] in kinds] or found
    return "\n\n".join(f"{title}\n\n{_plain(body)}" for title, body in found or named)


def main(argv: Sequence[str]) -> int:
    """Entry point of the command. Returns 1 if the page has no help for the error."""
    line = " ".join(argv)
    if line and line not in ("-h", "--help") and (text := explain(line)):
        with stdout.until_closed():
            print(text)
        return 0
    titles = [title for title, _ in _SECTION.findall(_page())]
    usage = "usage: ringjax explain NAME, or the whole line of an error\n\n"
    sys.stderr.write(f"{usage}It knows {', '.join(titles)}.\n")
    return 0 if line in ("-h", "--help") else 1
