"""Documents name files, headings and tests that exist; no promise is without a test."""

from __future__ import annotations

import re

import pytest
from support.launch import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.(?:py|cc))::(\w+)`", TEXT)))
FILES = sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.(?:py|cc))`", TEXT)))

_FOLDERS = ("ringjax", "xla_ext", "tests", "examples", "benchmarks", "docs")
_FOLDERS += ("release",)
_LISTED = [
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("*.md"),
        *(p for folder in _FOLDERS for p in (ROOT / folder).rglob("*.*")),
    ]
]
PAGES = sorted(path for path in _LISTED if path.endswith(".md"))
# Headers of TensorFlow's, which are in no folder of ours.
FOREIGN = {"tensorflow/c/kernels.h", "ops.h"}


def _anchors(text: str) -> set[str]:
    heads = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file.read_text()), (target, anchor)


@pytest.mark.parametrize("page", [p for p in PAGES if p != "CHANGELOG.md"])
def test_sources_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:[\w-]+/)*[a-z_][\w-]*\.(?:py|cc|h|cu))`", _prose(page))
    missing = {
        name
        for name in {*named} - FOREIGN
        if not any(f"/{path}".endswith(f"/{name}") for path in _LISTED)
    }
    assert not missing


def _prose(page: str) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text())


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
