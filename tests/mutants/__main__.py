"""python -m mutants [--only WORDS]: mutation tests of the native core.

For each mistake of table.toml, the program makes the mistake in a copy of the sources
in build/mutants, builds the copy, and runs the native tests. A mistake that no test
notices is a gap in the tests, unless the table gives a reason. Run the program by `make
mutants`, or from the folder tests/.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutants" / "tree"
BUILD = ROOT / "build" / "mutants" / "build"
COPIED = ("CMakeLists.txt", "xla_ext", "tests/native", "tests/fuzz")
# Timeouts in seconds, because a mistake may make tests hang.
TIMEOUT = 60  # for each of the tests that the table names
SUITE_TIMEOUT = 900  # for all tests


@dataclass(frozen=True)
class Mutant:
    """A deliberate mistake that replaces `original` at one place in `file`."""

    mistake: str  # a description
    file: str
    original: str
    replacement: str
    tests: list[str] = field(default_factory=list)  # should fail, and run first
    accepted: str = ""  # the reason why no test needs to fail

    def applied_to(self, source: str) -> str:
        """Returns `source` with the mistake.

        Raises:
            ValueError: if `original` does not occur exactly once.
        """
        if source.count(self.original) != 1:
            found = source.count(self.original)
            raise ValueError(f"{self.file} has its lines {found} times, not once")
        return source.replace(self.original, self.replacement)


def _files() -> Iterator[Path]:
    for name in COPIED:
        top = ROOT / name
        yield from [top] if top.is_file() else filter(Path.is_file, top.rglob("*"))


def _copy_tree() -> None:
    """Copies only changed files, because a build compiles all new files."""
    wanted = {path.relative_to(ROOT): path for path in _files()}
    for old in [path for path in TREE.rglob("*") if path.is_file()]:
        if old.relative_to(TREE) not in wanted:
            old.unlink()
    for name, path in wanted.items():
        copy = TREE / name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _build() -> str:
    """Builds the copy; returns the errors of the compiler, or ""."""
    done = subprocess.run(
        ["cmake", "--build", BUILD], capture_output=True, text=True, check=False
    )
    return done.stdout[-4000:] if done.returncode else ""


def _configure() -> None:
    options = ["-DRINGJAX_NATIVE_TESTS=ON", "-DRINGJAX_EXTENSION=OFF"]
    command = ["cmake", "-S", str(TREE), "-B", str(BUILD), "-G", "Ninja", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _noticed_by(name: str, seconds: float) -> str:
    """Runs the tests whose names contain `name`; returns the failing ones, or ""."""
    command = ["setarch", "-R", str(BUILD / "ringjax_native_tests"), name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{name or 'some test'}, which hangs"
    if done.returncode == 0:
        return ""
    failed = re.findall(r"^FAIL (\w+)", done.stdout, re.MULTILINE)
    return ", ".join(failed) or f"{name or 'a test'}, with exit code {done.returncode}"


def _run_tests(mutant: Mutant) -> str:
    """Returns the tests that fail with the mutant, or ""."""
    for name in mutant.tests:
        if noticed := _noticed_by(name, TIMEOUT):
            return noticed
    return _noticed_by("", SUITE_TIMEOUT)


def _try(mutant: Mutant) -> str:
    """Makes a mistake and returns the outcome; raises ValueError if it is a gap."""
    copy = TREE / mutant.file
    source = copy.read_text()
    copy.write_text(mutant.applied_to(source))
    try:
        if errors := _build():
            raise ValueError(f"it does not compile:\n{errors}")
        noticed = _run_tests(mutant)
    finally:
        copy.write_text(source)
    if noticed:
        return f"noticed by {noticed}"
    if mutant.accepted:
        return f"accepted: {mutant.accepted}"
    raise ValueError("no test notices it")


def _check_sound(mutants: Sequence[Mutant]) -> None:
    """Checks that without a mistake the copy builds and its tests pass."""
    if errors := _build():
        sys.exit(f"the sources do not compile:\n{errors}")
    for name in sorted({name for mutant in mutants for name in mutant.tests}):
        if failed := _noticed_by(name, TIMEOUT):
            sys.exit(f"without any mistake: {failed} fails")


def main() -> None:
    """Prints a line for each mistake, and exits with 1 if there is a gap."""
    parser = argparse.ArgumentParser(prog="python -m mutants")
    parser.add_argument(
        "--only", default="", help="only mistakes whose description has this"
    )
    only = parser.parse_args().only
    with (Path(__file__).parent / "table.toml").open("rb") as file:
        table = [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]
    mutants = [mutant for mutant in table if only in mutant.mistake]
    _copy_tree()
    _configure()
    _check_sound(mutants)
    gaps = 0
    for number, mutant in enumerate(mutants, 1):
        start = time.monotonic()
        try:
            outcome = _try(mutant)
        except ValueError as error:
            gaps += 1
            outcome = f"GAP: {error}"
        seconds = time.monotonic() - start
        position = f"[{number}/{len(mutants)}] {seconds:4.0f} s"
        print(f"{position}  {mutant.mistake}: {outcome}", flush=True)
    print(f"{len(mutants)} mistakes, {gaps} gaps")
    sys.exit(1 if gaps or not mutants else 0)


if __name__ == "__main__":
    main()
