"""Tests that documents only name existing files, headings, and tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tree import Check, Tree, expect_offences, report

FOLDERS = "ringjax xla_ext tests examples benchmarks docs release"
PROMISES = "docs/developers/promises.md"
# Headers of TensorFlow, which are not in this repository.
FOREIGN = {"tensorflow/c/kernels.h", "ops.h"}


def _pages(tree: Tree) -> list[str]:
    return tree.files(f". {FOLDERS}", ".md")


def _anchors(text: str) -> set[str]:
    heads = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def links_lead_somewhere(tree: Tree) -> Iterator[str]:
    for page in _pages(tree):
        for place, link in tree.matches(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page):
            file = (tree.root / page).parent / link[1] if link[1] else tree.root / page
            if not file.exists():
                yield f"{place}: there is no {link[1]}"
            elif link[2] and link[2] not in _anchors(file.read_text()):
                yield f"{place}: {file.name} has no heading #{link[2]}"


def named_sources_exist(tree: Tree) -> Iterator[str]:
    files = [f"/{path}" for path in tree.files(FOLDERS, ".py .cc .h .cu")]
    pattern = r"`((?:[\w-]+/)*[a-z_][\w-]*\.(?:py|cc|h|cu))`"
    for page in _pages(tree):
        blocks = re.compile(r"(?ms)^```.*?^```")
        prose = blocks.sub(lambda block: " " * len(block[0]), tree.text(page))
        for match in re.finditer(pattern, prose) if page != "CHANGELOG.md" else ():
            known = any(path.endswith(f"/{match[1]}") for path in files)
            if not known and match[1] not in FOREIGN:
                yield f"{tree.place(page, match.start())}: there is no {match[1]}"


def named_tests_exist(tree: Tree) -> Iterator[str]:
    for page in _pages(tree):
        for place, match in tree.matches(r"`(tests/[\w/]+\.(py|cc))::(\w+)`", page):
            path, kind, name = match.groups()
            line = rf"(?m)^def {name}\(" if kind == "py" else rf"(?m)^TEST\({name}\)"
            file = tree.root / path
            if not file.exists() or not re.search(line, file.read_text()):
                yield f"{place}: there is no {path}::{name}"


def every_promise_names_a_test(tree: Tree) -> Iterator[str]:
    text = tree.text(PROMISES)
    start = text.index("## What is promised")
    rows = [
        *re.compile(r"(?m)^\| .*$").finditer(text, start, text.find("\n## ", start))
    ]
    for row in rows:
        heads = ("| promise | shown by |", "| --- | --- |")
        if row[0] not in heads and not re.search(r"`tests/[\w/.]+::\w+`", row[0]):
            yield f"{tree.place(PROMISES, row.start())}: this names no test"
    if len(rows) <= 20:
        yield f"{PROMISES}:1: {len(rows)} rows of promises are too few"


CHECKS: list[Check] = [
    *(links_lead_somewhere, named_sources_exist),
    *(named_tests_exist, every_promise_names_a_test),
]


@pytest.mark.parametrize("check", CHECKS)
def test_documents_are_right(check: Check) -> None:
    report(check)


def test_each_offence_is_named(tmp_path: Path) -> None:
    files = {
        "CHANGELOG.md": "`gone.py`",
        "README.md": """# One head
[here](#one-head) [there](docs/developers/promises.md#what-is-promised) [x](https://a.b/c)
[a](gone.md) [c](#gone) !! there is no gone.md !! README.md has no heading #gone
[b](docs/developers/promises.md#gone) !! promises.md has no heading #gone
""",
        "docs/developers/promises.md": """ !! 5 rows of promises are too few
```
`gone.py`
```
## What is promised
| promise | shown by |
| --- | --- |
| one | `tests/test_it.py::test_it` |
| two | `tests/test_it.py::test_x`, `test_it.py` | !! no tests/test_it.py::test_x
| three | `gone.py` | !! there is no gone.py !! this names no test

## More
| four | `tests/gone.cc::It` | !! there is no tests/gone.cc::It
""",
        "tests/test_it.py": "def test_it() -> None:",
    }
    expect_offences(CHECKS, tmp_path, files)
