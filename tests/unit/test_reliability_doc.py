"""docs/reliability.md promises nothing without a test: those that it names exist."""

from __future__ import annotations

import re

import pytest
from support.launch import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.(?:py|cc))::(\w+)`", TEXT)))
FILES = sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.(?:py|cc))`", TEXT)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    pattern = rf"^def {name}\(" if path.endswith(".py") else rf"^TEST\({name}\)"
    assert re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_promise_names_a_test() -> None:
    promises = TEXT.partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")]
    for row in rows:
        if row not in ("| promise | shown by |", "| --- | --- |"):
            assert re.search(r"`tests/[\w/.]+::\w+`", row), row
    assert len(rows) > 20
