"""Tests of the site: its table of contents, the API reference, explained errors.

These tests need no Sphinx. `make docs` builds the site, and tests/docs/test_pages.py
runs its programs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest
from support.launch import ROOT

import ringjax
from ringjax import errors, explain

DOCS = ROOT / "docs"
PAGES = {
    p.relative_to(DOCS).with_suffix("").as_posix()
    for kind in ("md", "ipynb")
    for p in DOCS.rglob(f"*.{kind}")
}
TROUBLE = (DOCS / "troubleshooting.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [
    *(ROOT / "ringjax").rglob("*.py"),
    *(p for p in (ROOT / "xla_ext").rglob("*") if p.suffix in (".h", ".cc")),
]


def _load(path: str) -> ModuleType:
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _toctree(page: str) -> set[str]:
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"(?ms)^```\{toctree\}\n(.*?)^```", text)
    return {line for b in blocks for line in b.splitlines() if line and line[0] != ":"}


def test_every_page_is_in_the_table_of_contents() -> None:
    api = {f"reference/api/{page}" for page in _toctree("reference/api/index")}
    assert _toctree("index") | api | {"index"} == PAGES


# Words of a question in the FAQ, and words that its answer must contain. The text below
# the target of the last link of the answer counts, too.
ANSWERS = {
    "install": ["pip install .", "--check-build"],
    "share": ["ringjax.data.shard", "DistributedSampler"],
    "unequal": ["even_steps", "hvd.join()"],
    "learning rate": ["multiply", "`size`"],
    "saves": ["rank 0 alone writes", "broadcast_optimizer_state"],
    "accuracy": ["hvd.allreduce", "MetricAverageCallback"],
    "hang": ["line of", "collective_timeout"],
    "shut down": ["has shut down", "last line"],
    "no faster": ["--profile", "on 2 CPUs"],
    "several hosts": ["-H one:4,two:4", "--network-interfaces"],
}


def _under(page: str, anchor: str) -> str:
    """Returns the text of a page, or the text of the section with this anchor."""
    text = (DOCS / page).read_text()
    if not anchor:
        return text
    below = re.split(r"(?m)^#+ (.*)$", text)
    pairs = zip(below[1::2], below[2::2], strict=True)
    return next(t for h, t in pairs if h.lower().replace(" ", "-") == anchor)


def test_answers_are_in_the_faq_or_its_links() -> None:
    """test_documents.py checks that the links lead somewhere."""
    page = (DOCS / "operate" / "faq.md").read_text()
    answers = dict(re.findall(r"(?ms)^## ([^\n]*\?)\n(.*?)(?=^## )", page))
    assert len(answers) >= len(ANSWERS)
    for about, words in ANSWERS.items():
        (question,) = (text for text in answers if about in text)
        target, anchor = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", answers[question])[-1]
        text = answers[question] + _under(f"operate/{target}", anchor)
        assert not [word for word in words if word not in text], question


def test_the_reference_lists_every_public_name() -> None:
    text = "".join(
        page.read_text() for page in (DOCS / "reference" / "api").glob("*.md")
    )
    listed = {n for names in re.findall(r":names: (.*)", text) for n in names.split()}
    modules = set(re.findall(r"\{ringjax-names\} ringjax\.(\w+)", text))
    missing = set(ringjax.__all__) - listed - modules
    assert not missing
    assert {"torch", "tensorflow", "keras"} <= modules


def test_every_error_has_a_section_in_troubleshooting() -> None:
    headings = {h.lower() for h in re.findall(r"(?m)^## (.*)$", TROUBLE)}
    found = [k for k in vars(errors).values() if isinstance(k, type)]
    ours = {k for k in found if issubclass(k, errors.RingjaxError)}
    assert len(ours) > 6
    for kind in ours - {errors.RingjaxError}:
        command = kind("why").__notes__[0].removeprefix("Help: ringjax explain ")
        assert command == kind.__name__ and command.lower() in headings
        assert explain.explain(command).splitlines()[0] == kind.__name__


NOWHERE = re.compile(r"https://(?:ringjax\.|[\w.]+/ringjax)")


def test_no_file_contains_an_address_of_the_project() -> None:
    """The project has no address before its first release sets `[project.urls]`."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    texts = {name: (ROOT / name).read_text(errors="replace") for name in files}
    assert not [name for name, text in texts.items() if NOWHERE.search(text)]


def test_an_error_is_explained_by_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "PeerLost: RINGJAX[world, epoch 0]: allreduce 'x': rank 0 has shut down before"
    )
    assert explain.main(["ringjax.errors." + line + " this call"]) == 0
    found = capsys.readouterr().out
    assert found.startswith("PeerLost\n\n- `has shut down before this call`: ")
    assert found.count("\n- ") == 1
    status = "JaxRuntimeError: DEADLINE_EXCEEDED: RINGJAX[world, epoch 0]: barrier: why"
    assert explain.main([status]) == 0
    assert capsys.readouterr().out.startswith("Stalled\n")
    assert explain.main(["nothing", "of", "ours"]) == 1
    assert "It knows PeerLost, Fenced, " in capsys.readouterr().err


def test_explained_error_texts_occur_in_the_sources() -> None:
    """Adjacent string literals are joined, as the compiler does."""
    joined = "".join(re.sub(r'"\s*\n?\s*f?"', "", path.read_text()) for path in SOURCES)
    explained = re.findall(r"\*\*`([^`]+)`\*\*", TROUBLE)
    assert len(explained) > 40
    assert not [text for text in explained if text not in joined]


def test_pictures_are_up_to_date() -> None:
    draw = _load("docs/pictures/draw.py")
    kept = {p.stem: p.read_text() for p in (DOCS / "pictures").glob("*.svg")}
    assert kept == {name: make().svg() for name, make in draw.PICTURES.items()}


def test_shapes_are_inside_their_pictures() -> None:
    beyond = []
    for name in ("shared-segment", "gradient", "ranks", "recovery"):
        root = ET.parse(DOCS / "pictures" / f"{name}.svg").getroot()
        width, height = int(root.attrib["width"]), int(root.attrib["height"])
        for shape in root.iter():
            x, y = (float(shape.get(n, shape.get(f"c{n}", 0))) for n in "xy")
            right = x + float(shape.get("width", 0)) if "rx" in shape.attrib else x
            bottom = y + float(shape.get("height", 0)) if "rx" in shape.attrib else y
            if not (0 <= x <= right <= width and 0 <= y <= bottom <= height):
                beyond.append((name, shape.attrib))
    assert not beyond


def test_the_recording_is_small_and_complete() -> None:
    file = DOCS / "pictures" / "recorded" / "killed.svg"
    assert file.stat().st_size < 150_000
    shown = [text.strip() for text in ET.parse(file).getroot().itertext()]
    story = [r"\$ ringrun -np 3 --min-np 2 .*", r"\$ kill -9 \d+ +# rank 2"]
    story += [r".*was killed by signal 9 \(SIGKILL\); 2 ranks go on"]
    story += [r"ringrun: worker 3 joined as rank 2; 3 ranks", r".*on 3 rank\(s\)"]
    for line in story:
        assert any(re.fullmatch(line, text) for text in shown), line
    assert not [text for text in shown if re.search(r"/(root|home|tmp|work)/", text)]
