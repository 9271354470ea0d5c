"""Tests that documented commands use options, files, and settings that exist.

tests/docs/test_pages.py runs the programs of the pages. The tests here only parse
commands, because many need several hosts, an engine, or a day.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.launch import ROOT
from support.tree import Check, Tree, expect_offences, report

from ringjax import bench
from ringjax.__main__ import COMMANDS
from ringjax.config import Config, variables
from ringjax.doctor import cli as doctor
from ringjax.run import options
from ringjax.top import cli as top

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


def need(found: object, text: str) -> None:
    """Raises if `found` is false: a file, an option, or a setting does not exist."""
    if not found:
        raise ValueError(f"there is no {text}")


def check(words: list[str]) -> None:
    """Raises, or exits with argparse's message, if a command is not valid."""
    while words and (words[0] in ("exec", "export") or re.match(r"\w+=", words[0])):
        name, _, value = words.pop(0).partition("=")
        if name.startswith("RINGJAX_"):
            need(name in SETTINGS, f"setting {name}")
            Config.from_env({name: value})
    if not words or words[0] in OTHERS | SHELLS:
        return
    program, rest = words[0].rpartition("/")[2], words[1:]
    if program == "ringrun":
        args = options.parse(rest, "0")
        Config.from_env(options.environment(args))
        check(args.command)
    elif program == "ringjax":
        need(rest[0] in COMMANDS, f"command ringjax {rest[0]}")
        PARSERS[f"ringjax {rest[0]}"](rest[1:])
    elif program == "python" and rest[0] == "-m":
        module = rest[1].partition(".tensorflow")[0]
        need(importlib.util.find_spec(module), f"module {module}")
        if rest[1] in PARSERS:
            PARSERS[rest[1]](rest[2:])
    elif program == "python":
        need(rest[0] == "train.py" or (ROOT / rest[0]).is_file(), f"program {rest[0]}")
    elif program == "pip":
        for extra in re.findall(r"ringjax\[([\w,]+)\]", " ".join(rest)):
            unknown = {*extra.split(",")} - PROJECT["optional-dependencies"].keys()
            need(not unknown, f"extra {unknown}")
    else:
        need(program == "make", f"program {words[0]} that is known here")
        need(rest[0] in TARGETS, f"target {rest[0]}")


def split(line: str) -> list[str]:
    """Splits a command into words. A command substitution counts as one word."""
    return shlex.split(re.sub(r"\$\([^)]*\)", "WORD", line), comments=True)


def fault(command: str) -> str:
    """Returns the mistake in a shell or container command, or ""."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            check(json.loads(command) if command[:1] == "[" else split(command))
        except (Exception, SystemExit) as error:
            return told.getvalue().strip().rpartition("\n")[2] or repr(error)
    return ""


def _pages(tree: Tree) -> list[str]:
    return [page for page in tree.files(". docs", ".md") if page != "CHANGELOG.md"]


def _blocks(tree: Tree) -> Iterator[tuple[str, re.Match[str]]]:
    for page in _pages(tree):
        for _, match in tree.matches(r"(?ms)^```sh\n(.*?)^```", page):
            yield page, match


def commands_in_blocks(tree: Tree) -> Iterator[str]:
    for page, block in _blocks(tree):
        shell = ["sh", "-n"]
        done = subprocess.run(shell, input=block[1], text=True, stderr=subprocess.PIPE)
        if done.returncode:
            yield f"{tree.place(page, block.start(1))}: {done.stderr.strip()}"
            continue
        for match in re.finditer(r"(?m)^(?:.*\\\n)*.*$", block[1]):
            line = match[0].replace("\\\n", " ")
            left_open = re.search(r"\[options\]|^\w+ \(|^\s*[})]", line)
            if not left_open and (found := fault(line)):
                yield f"{tree.place(page, block.start(1) + match.start())}: {found}"


def _sentences(tree: Tree) -> Iterator[tuple[str, re.Match[str]]]:
    """Yields commands in sentences with their places. They may omit option values."""
    for page in _pages(tree):
        yield from tree.matches(r"`(ringrun|ringjax (?:doctor|top))\s([^`]*)`", page)


def options_in_sentences(tree: Tree) -> Iterator[str]:
    for place, match in _sentences(tree):
        own = re.split(r"\spython\s", match[2])[0]
        for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", own):
            if option not in OPTIONS[match[1]]:
                yield f"{place}: {match[1]} has no {option}"


def _containers(tree: Tree) -> Iterator[tuple[str, re.Match[str]]]:
    yield from tree.matches(r"(?s)\A(.*)", "examples/kubernetes/Dockerfile")
    for page in _pages(tree):
        yield from tree.matches(r"(?ms)^```dockerfile\n(.*?)^```", page)


def commands_of_containers(tree: Tree) -> Iterator[str]:
    for place, container in _containers(tree):
        commands = re.findall(r"(?m)^CMD (.*)$", container[1])
        if len(commands) != 1:
            yield f"{place}: {len(commands)} commands in a container, expected 1"
        for found in filter(None, map(fault, commands)):
            yield f"{place}: {found}"
        for source in re.findall(r"(?m)^COPY (\S+)", container[1]):
            if (
                source not in ("train.py", "ringjax-*.whl")
                and not (ROOT / source).exists()
            ):
                yield f"{place}: there is no {source} to copy"


CHECKS: list[Check] = [commands_in_blocks, options_in_sentences, commands_of_containers]


@pytest.mark.parametrize("check", CHECKS)
def test_every_documented_command_is_valid(check: Check) -> None:
    report(check)


def test_the_pages_contain_commands() -> None:
    counts = [len([*find(Tree())]) for find in (_blocks, _sentences, _containers)]
    assert counts[0] > 20 and counts[1] > 20 and counts[2] == 2


BROKEN = """```sh
ringrun -np 2 \\
  python train.py
ringrun -np 2 --profil /tmp python train.py  # !! --profil
ringrun -np two python train.py  # !! two
ringrun -np 2 no-python train.py  # !! no-python
ringrun -np 2 python examples/jax_digit.py  # !! jax_digit.py
ringrun --log-level loud python train.py  # !! loud
ringrun -np 4 python -m ringjax.bench allreduse  # !! allreduse
ringjax doctr  # !! doctr
ringjax doctor -G one:4  # !! -G
python -m ringjax_bench  # !! ringjax_bench
RINGJAX_ALGORITHMS=ring python train.py  # !! ALGORITHMS
RINGJAX_LOG_LEVEL=loud python train.py  # !! loud
pip install 'ringjax[tops]'  # !! tops
make dcos  # !! dcos
```
`ringrun -np 2 --gone python -x` !! ringrun has no --gone
"""


def test_invalid_commands_are_named(tmp_path: Path) -> None:
    files = {
        "README.md": BROKEN,
        "docs/run/hosts.md": """```sh
if # !! unexpected
```
```dockerfile
FROM it # !! 0 commands in a container
```
""",
        "examples/kubernetes/Dockerfile": """# !! 'x' !! no gone.py to copy
COPY gone.py .
CMD ["ringrun", "-np", "x", "python", "train.py"]
""",
    }
    expect_offences(CHECKS, tmp_path, files)
