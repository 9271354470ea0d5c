"""Compiles the C++ part of a peer for this CPU.

It is compiled at the first use, and kept in build/benchmarks/.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build" / "benchmarks"
FLAGS = "-std=c++20 -O3 -march=native -shared -fPIC -pthread -Wall -Wextra -Wshadow"


class CannotBuild(RuntimeError):
    """Error: no compiler, or the compiler fails; the text contains the reason."""


def build(source: Path, *words: str, folder: Path = BUILD) -> Path:
    """Returns the shared object of a source file; `words` follow it in the command.

    Raises:
      CannotBuild: there is no compiler, or the compiler fails.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise CannotBuild(f"no compiler {compiler[0]} here")
    recipe = [platform.node(), *compiler, FLAGS, *words]
    files = (path for path in source.parent.iterdir() if path.suffix in (".cc", ".h"))
    recipe += [path.read_text() for path in sorted(files)]
    digest = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
    library = folder / f"lib{source.stem}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{library.name}.{os.getpid()}"
        command = [*compiler, *FLAGS.split(), "-o", str(beside), str(source), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"{shlex.join(command)}:\n{done.stderr[-2000:]}")
        beside.replace(library)
    return library
