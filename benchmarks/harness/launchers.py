"""Finds the launcher and the Python of a peer's ranks, or the reason of their absence.

worlds.py starts the ranks.
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

from benchmarks.peers import compiled, limit, oneccl
from benchmarks.peers.table import Entry

# For example, build/peers/horovod/bin/python is the Python for Horovod; see README.md.
PEERS_FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"


class Absent(RuntimeError):
    """Error: a peer is not available here; the text contains the reason."""


@dataclass
class Launch:
    """How the ranks of a peer are started.

    Attributes:
      words: the words before the command of a rank.
      each: whether ranks are started one by one; otherwise `words` start all ranks.
      environment: additional variables.
      python: the Python of the ranks.
      restless: whether the ranks use CPU time even if there is no request.
    """

    words: list[str] = field(default_factory=list)
    each: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    restless: bool = False


def interpreter(peer: str, options: argparse.Namespace) -> str:
    """Returns the Python of a peer: from --python, PEERS_FOLDER, or this Python.

    Horovod and mpi4jax are built for one version of torch and jax, which may differ
    from the versions for ringjax.
    """
    named: dict[str, str] = options.python
    beside = PEERS_FOLDER / peer / "bin" / "python"
    return named.get(peer) or (str(beside) if beside.exists() else sys.executable)


def find(
    entry: Entry,
    ranks: int,
    options: argparse.Namespace,
    folder: Path,
    python: str = sys.executable,
) -> Launch:
    """Returns how to start the ranks of a peer; `folder` is for files of the launcher.

    Raises:
      Absent: a module or a program is missing.
    """
    launch = _launch(entry, ranks, options, folder, python)
    launch.python = python
    return launch


def _launch(
    entry: Entry, ranks: int, options: argparse.Namespace, folder: Path, python: str
) -> Launch:
    for module in missing(entry.modules, python):
        where = "here" if python == sys.executable else f"for {python}"
        raise Absent(f"no module {module} {where}")
    try:
        if entry.kind is limit.Limit:
            limit.build()
        elif entry.kind is oneccl.OneCcl:
            oneccl.build(Path(python).parent.parent)
    except compiled.CannotBuild as error:
        raise Absent(str(error)) from None
    if entry.launcher == "ringrun":
        words = [python, "-m", "ringjax.run", "-np", str(ranks), *entry.options]
        return Launch(words, environment=dict(entry.environment))
    if entry.launcher == "horovodrun":
        words = [_program("horovodrun", python), "--gloo", "-np", str(ranks)]
        # The ranks are stopped during the turns of other peers, which must not count as
        # a failure.
        environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
        return Launch(words, environment=environment, restless=True)
    if entry.launcher == "mpirun":
        return _mpirun(shlex.split(options.mpirun), ranks, python)
    if entry.launcher == "mpich":
        # mpiexec of the PyPI package, with the package's library.
        own = shutil.which("mpiexec", path=_beside(python))
        words = [own] if own else shlex.split(options.mpich)
        words[0] = _program(words[0], python)
        library = {} if own else _mpich_library(folder)
        return Launch([*words, "-n", str(ranks)], environment=library)
    if entry.launcher == "impi":
        own = shutil.which("mpiexec.hydra", path=_beside(python))
        if own is None:
            raise Absent(f"no mpiexec.hydra beside {python}")
        # Without this variable, ranks that wait do not let other ranks use the core.
        crowded = ranks > (os.cpu_count() or 1)
        yields = {"I_MPI_THREAD_YIELD": "2"} if crowded else {}
        environment = {**entry.environment, **yields}
        return Launch([own, "-n", str(ranks)], environment=environment)
    return Launch(environment=dict(entry.environment), each=True)


def missing(modules: Sequence[str], python: str) -> list[str]:
    """Returns the modules that a Python cannot import.

    Raises:
      Absent: the Python does not exist.
    """
    if python == sys.executable:
        return [m for m in modules if importlib.util.find_spec(m) is None]
    script = "import sys, importlib.util as u\nfor m in sys.argv[1:]:\n"
    script += "  if u.find_spec(m) is None: print(m)"
    words = [python, "-c", script, *modules]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True)
    except OSError as error:
        raise Absent(f"no Python {python}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise Absent(f"{python}: {error.stderr.strip()[-200:]}") from None
    return said.stdout.split()


def _beside(python: str) -> str:
    return str(Path(python).parent)


def _program(name: str, python: str) -> str:
    """Returns the path of a program: next to the peer's Python, else on PATH."""
    found = shutil.which(name, path=_beside(python)) or shutil.which(name)
    if found is None:
        raise Absent(f"no program {name} here")
    return found


def _mpirun(words: Sequence[str], ranks: int, python: str) -> Launch:
    """Returns the words of --mpirun. A single word gets options for a fast Open MPI."""
    program = _program(words[0], python)
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    )
    launch = Launch([program, *words[1:], "-n", str(ranks)])
    if "Open MPI" not in said.stdout and "OpenRTE" not in said.stdout:
        return launch
    if len(words) == 1:
        launch.words[1:1] = open_mpi_words(ranks, os.cpu_count() or 1)
    library = ctypes.util.find_library("mpi")
    # Beside its own MPI, mpi4py finds the library without help.
    own = Path(program).parent == Path(python).parent
    if library is not None and not own:
        launch.environment["MPI4PY_LIBMPI"] = os.environ.get("MPI4PY_LIBMPI", library)
    return launch


def open_mpi_words(ranks: int, cpus: int) -> list[str]:
    """Returns options of Open MPI for more ranks than cores, without busy waiting.

    With enough cores, each rank is bound to one. Linux would otherwise keep two ranks
    on one core, where they spin without yielding.
    """
    if ranks <= cpus:
        return ["--bind-to", "core"]
    yields = ["--mca", "mpi_yield_when_idle", "1"]
    return ["--oversubscribe", "--bind-to", "none", *yields]


def _mpich_library(folder: Path) -> dict[str, str]:
    """Makes mpi4py load MPICH as libmpi.so.12, which Debian calls libmpich.so.12."""
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
