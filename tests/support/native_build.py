"""Builds the native core and its tests in build/native.

The Makefile runs this file as a program to build the core that the extension links.
tests/native/conftest.py builds the test program with it. ninja rebuilds only changed
files. pip builds the extension itself.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"
CORE, TESTS = "ringjax_core", "ringjax_native_tests"


class BuildError(Exception):
    """The build failed. The text names a missing program, or is the build's output."""


def build(target: str) -> Path:
    """Builds `target` if it is not up to date. Returns its folder.

    Raises:
      BuildError: if cmake or ninja is missing, or if the sources do not compile.
    """
    cmake, ninja = map(_program, ("cmake", "ninja"))
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest-xdist runs several processes
        _configure(cmake, ninja)
        _run([ninja, "-C", str(BUILD), target])
    return BUILD


@functools.cache
def tests() -> Path:
    """Builds the test program once, and returns its path."""
    return build(TESTS) / TESTS


def _configure(cmake: str, ninja: str) -> None:
    """Runs cmake unless it has already run with an equal command."""
    options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    options += ["-DRINGJAX_NATIVE_TESTS=ON", "-DRINGJAX_EXTENSION=OFF"]
    words = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options]
    stamp, text = BUILD / "configured", "\n".join([*words, os.environ.get("CXX", "")])
    if not stamp.exists() or stamp.read_text() != text:
        (BUILD / "CMakeCache.txt").unlink(missing_ok=True)  # may name another compiler
        _run(words)
        stamp.write_text(text)


def _program(name: str) -> str:
    """Finds a program beside this interpreter (the extra `test`), or on PATH."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise BuildError(f"the native tests need {name}: pip install {name}")
    return found


def _run(words: list[str]) -> None:
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"{' '.join(words)}\n{done.stdout[-8000:]}")


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or [CORE, TESTS]:
            build(name)
    except BuildError as error:
        sys.exit(str(error))
