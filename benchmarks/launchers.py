"""Who starts the ranks of a peer, and whether it is here: words and variables.

Starts nothing; that is worlds.py.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import limit
from benchmarks.peers import Entry


class Absent(RuntimeError):
    """A peer that cannot be had here; the text says why."""


@dataclass
class Launch:
    """How the ranks of a peer are started.

    Attributes:
      words: come before the command of a rank.
      each: the ranks are started one by one; else `words` start all of them.
      environment: more variables.
    """

    words: list[str] = field(default_factory=list)
    each: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def find(entry: Entry, ranks: int, options: argparse.Namespace, folder: Path) -> Launch:
    """How to start so many ranks of a peer; `folder` is for what that needs.

    Raises:
      Absent: a module or a program is missing.
    """
    for module in entry.modules:
        if importlib.util.find_spec(module) is None:
            raise Absent(f"no module {module} here")
    if entry.kind is limit.Limit:
        try:
            limit.build()
        except limit.CannotBuild as error:
            raise Absent(str(error)) from None
    if entry.launcher == "ringrun":
        return Launch([sys.executable, "-m", "ringjax.run", "-np", str(ranks)])
    if entry.launcher == "horovodrun":
        words = [_program("horovodrun"), "--gloo", "-np", str(ranks)]
        return Launch(words)
    if entry.launcher == "mpirun":
        return _mpirun(shlex.split(options.mpirun), ranks)
    if entry.launcher == "mpich":
        words = shlex.split(options.mpich)
        _program(words[0])
        return Launch([*words, "-n", str(ranks)], environment=_mpich_library(folder))
    return Launch(each=True)


def _program(name: str) -> str:
    """Where a program is: on PATH, or beside this Python."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise Absent(f"no program {name} here")
    return found


def _mpirun(words: Sequence[str], ranks: int) -> Launch:
    """The words of --mpirun; a single one gets what Open MPI needs to be fast."""
    program = _program(words[0])
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    )
    launch = Launch([*words, "-n", str(ranks)])
    if "Open MPI" not in said.stdout and "OpenRTE" not in said.stdout:
        return launch
    if len(words) == 1:
        launch.words[1:1] = open_mpi_words(ranks, os.cpu_count() or 1)
    library = ctypes.util.find_library("mpi")
    if library is not None:  # else mpi4py has to find one
        launch.environment["MPI4PY_LIBMPI"] = os.environ.get("MPI4PY_LIBMPI", library)
    return launch


def open_mpi_words(ranks: int, cpus: int) -> list[str]:
    """More ranks than cores, and no rank that waits on a core that another needs."""
    words = ["--oversubscribe", "--bind-to", "none"]
    return words + (["--mca", "mpi_yield_when_idle", "1"] if ranks > cpus else [])


def _mpich_library(folder: Path) -> dict[str, str]:
    """Makes mpi4py load MPICH: it asks for libmpi.so.12, Debian says libmpich.so.12."""
    if "MPI4PY_LIBMPI" in os.environ and ctypes.util.find_library("mpich") is None:
        return {}
    library = ctypes.util.find_library("mpich")
    if library is None:
        raise Absent("no library libmpich here")
    beside = folder / "mpich"
    beside.mkdir(exist_ok=True)
    link = beside / "libmpi.so.12"
    if not link.exists():
        link.symlink_to(_path_of(library))
    paths = [str(beside), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"MPI4PY_LIBMPI": str(link), "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _path_of(library: str) -> Path:
    """Where the loader finds it."""
    said = subprocess.run(
        [shutil.which("ldconfig") or "/sbin/ldconfig", "-p"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in said.stdout.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.split(" ")[0] == library:
            return Path(path)
    raise Absent(f"ldconfig does not know where {library} is")
