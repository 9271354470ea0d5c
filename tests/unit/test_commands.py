"""Every command of the documentation is one: its options, files, targets and settings.

The programs of the pages run in tests/ranks/test_pages.py; what would take several
hosts, an engine or a day to run is read here by those who would read it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Sequence

import pytest
from support.launch import ROOT

from ringjax import bench
from ringjax.__main__ import COMMANDS
from ringjax.config import Config, variables
from ringjax.doctor import cli as doctor
from ringjax.run import options
from ringjax.top import cli as top

PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    if page.name != "CHANGELOG.md"
]
BLOCKS = [
    (page, number, block)
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"(?ms)^```sh\n(.*?)^```", (ROOT / page).read_text())
    )
]
# In sentences, where a value may be left open.
INLINE = [
    (page, program, words)
    for page in PAGES
    for program, words in re.findall(
        r"`(ringrun|ringjax (?:doctor|top))\s([^`]*)`", (ROOT / page).read_text()
    )
]
CONTAINERS = [(ROOT / "examples" / "kubernetes" / "Dockerfile").read_text()]
CONTAINERS += re.findall(
    r"(?ms)^```dockerfile\n(.*?)^```", (ROOT / "docs" / "hosts.md").read_text()
)
SETTINGS = {name for field in dataclasses.fields(Config) for name in variables(field)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
PARSERS: dict[str, Callable[[Sequence[str]], object]] = {
    "ringjax.bench": bench.parse,
    "ringjax doctor": lambda words: doctor.parser().parse_args(words),
    "ringjax top": lambda words: top.parser().parse_args(words),
}
OPTIONS = {
    "ringrun": {*options.build_parser("0")._option_string_actions},
    "ringjax doctor": {*doctor.parser()._option_string_actions},
    "ringjax top": {*top.parser()._option_string_actions},
}
OTHERS = {".venv/bin/pytest", "curl", "kubectl", "hostname", "(umask"}
SHELLS = {"if", "fi", "until", "done"}


def check(words: list[str]) -> None:
    """Raises, or ends with argparse's message, if a command cannot be meant."""
    while words and (words[0] in ("exec", "export") or re.match(r"\w+=", words[0])):
        name, _, value = words.pop(0).partition("=")
        if name.startswith("RINGJAX_"):
            assert name in SETTINGS, name
            Config.from_env({name: value})
    if not words or words[0] in OTHERS | SHELLS:
        return
    program, rest = words[0].rpartition("/")[2], words[1:]
    if program == "ringrun":
        args = options.parse(rest, "0")
        Config.from_env(options.environment(args))
        check(args.command)
    elif program == "ringjax":
        assert rest[0] in COMMANDS
        PARSERS[f"ringjax {rest[0]}"](rest[1:])
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1].partition(".tensorflow")[0]), rest
        if rest[1] in PARSERS:
            PARSERS[rest[1]](rest[2:])
    elif program == "python":
        assert rest[0] == "train.py" or (ROOT / rest[0]).is_file(), rest
    elif program == "pip":
        for extra in re.findall(r"ringjax\[([\w,]+)\]", " ".join(rest)):
            assert {*extra.split(",")} <= PROJECT["optional-dependencies"].keys()
    else:
        assert program == "make", words
        assert rest[0] in TARGETS


def split(line: str) -> list[str]:
    """The words; what another command would put in is one of them."""
    return shlex.split(re.sub(r"\$\([^)]*\)", "WORD", line), comments=True)


@pytest.mark.parametrize(("page", "number", "block"), BLOCKS)
def test_a_block(page: str, number: int, block: str) -> None:
    subprocess.run(["sh", "-n"], input=block, text=True, check=True)
    for line in block.replace("\\\n", " ").splitlines():
        if not re.search(r"\[options\]|^\w+ \(|^\s*[})]", line):
            check(split(line))


@pytest.mark.parametrize(("page", "program", "words"), INLINE)
def test_in_a_sentence(page: str, program: str, words: str) -> None:
    own = re.split(r"\spython\s", words)[0]
    given = re.findall(r"(?<!\S)--?[a-z][\w-]*", own)
    assert {*given} <= OPTIONS[program]


@pytest.mark.parametrize("text", CONTAINERS, ids=range(len(CONTAINERS)))
def test_in_a_container(text: str) -> None:
    (command,) = re.findall(r"(?m)^CMD (.*)$", text)
    check(json.loads(command))
    for source in re.findall(r"(?m)^COPY (\S+)", text):
        assert source == "train.py" or (ROOT / source).exists(), source


def test_there_are_commands() -> None:
    assert len(BLOCKS) > 20 and len(INLINE) > 20 and len(CONTAINERS) == 2


@pytest.mark.parametrize(
    "command",
    [
        "ringrun -np 2 --profil /tmp python train.py",
        "ringrun -np two python train.py",
        "ringrun -np 2 no-python train.py",
        "ringrun -np 2 python examples/jax_digit.py",
        "ringrun --log-level loud python train.py",
        "ringrun -np 4 python -m ringjax.bench allreduse",
        "ringjax doctr",
        "ringjax doctor -G one:4",
        "python -m ringjax_bench",
        "RINGJAX_ALGORITM=ring python train.py",
        "RINGJAX_LOG_LEVEL=loud python train.py",
        "pip install 'ringjax[tops]'",
        "make dcos",
    ],
)
def test_what_is_broken_is_seen(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check(split(command))
