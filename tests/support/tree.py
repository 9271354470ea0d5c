"""The files of the project, read and parsed once for all tests that check the files.

A check, such as those of test_layers.py and test_documents.py, takes a `Tree` and
yields a line for each offence.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launch import ROOT


@dataclass(frozen=True)
class Module:
    """The parts of a Python file that checks need. Syntax trees need more memory."""

    docstring: str | None
    docstrings: list[str]  # of the module, its classes and its functions
    imports: list[ast.Import | ast.ImportFrom]  # also inside functions
    functions: list[tuple[str, int, int]]  # name, line, lines without the docstring


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield from _statements(child)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


@functools.cache
def _module(path: Path) -> Module:
    tree = ast.parse(_text(path), str(path))
    module = Module(ast.get_docstring(tree), [], [], [])
    for node in _statements(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.imports.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions.append((node.name, node.lineno, _length(node)))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            module.docstrings.append(ast.get_docstring(node) or "")
    return module


@dataclass(frozen=True)
class Tree:
    """The files below `root`, by default the checkout. Paths are relative to `root`."""

    root: Path = ROOT

    def files(self, folders: str, kinds: str) -> list[str]:
        """Returns all files with these suffixes. The folder `.` is not recursive."""
        found = [
            path.relative_to(self.root).as_posix()
            for name in folders.split()
            for path in sorted((self.root / name).glob("*" if name == "." else "**/*"))
            if path.suffix in kinds.split()
        ]
        assert found, f"no file to check: {folders} ({kinds})"
        return found

    def text(self, path: str) -> str:
        """Returns the text of a file."""
        return _text(self.root / path)

    def module(self, path: str) -> Module:
        """Returns the parsed parts of a Python file."""
        return _module(self.root / path)

    def place(self, path: str, offset: int) -> str:
        """Returns the place of a character of a file as `path:line`."""
        return f"{path}:{self.text(path).count(chr(10), 0, offset) + 1}"

    def matches(self, pattern: str, path: str) -> Iterator[tuple[str, re.Match[str]]]:
        """Yields the place and the match for each match of a pattern in a file.

        The place is that of the first group, or of the match if there are no groups.
        """
        for match in re.finditer(pattern, self.text(path)):
            yield self.place(path, match.start(min(1, match.re.groups))), match


Check = Callable[[Tree], Iterator[str]]


def report(check: Check) -> None:
    """Fails the test if a check finds offences in the checkout, and lists them."""
    if offences := [*check(Tree())]:
        pytest.fail("\n".join(offences), pytrace=False)


def expect_offences(
    checks: Sequence[Check], folder: Path, files: Mapping[str, str], *more: str
) -> None:
    """Fails unless the checks find exactly the offences that `files` announces.

    A line of a file announces each of its offences by ` !! ` and words of the message.
    `more` holds whole messages, for offences that no line can announce. Each check must
    also fail in a folder without files.
    """
    for check in checks:
        with pytest.raises((AssertionError, OSError)):
            list(check(Tree(folder / "empty")))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    lines = (
        (p, n, x) for p, t in files.items() for n, x in enumerate(t.split("\n"), 1)
    )
    expected = [f"{p}:{n}: {why}" for p, n, x in lines for why in x.split(" !! ")[1:]]
    found = [offence for check in checks for offence in check(Tree(folder))]
    for text in [*expected, *more]:
        place, _, why = text.partition(": ")
        named = [x for x in found if x.startswith(f"{place}: ") and why in x]
        assert named, (text, found)
        found.remove(named[0])
    assert not found
