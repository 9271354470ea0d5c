"""Writes xla_ext/mpi/mpi_names.h from MPItrampoline's lists.

`python release/mpi_names.py CHECKOUT` reads the lists of a checkout of MPItrampoline
(github.com/eschnett/MPItrampoline). It omits the names that mpi_library.cc defines.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "xla_ext" / "mpi"
HEAD = """\
// The names of MPItrampoline's ABI that JAX does not use, each in CONSTANT or FUNCTION.
// Written by release/mpi_names.py; do not edit. There is no include guard, because
// mpi_library.cc includes the file where it defines both macros.
"""


def abi_name(name: str) -> str:
    """Returns the name of an MPI name in MPItrampoline's ABI.

    Example:
        >>> abi_name("MPI_Send"), abi_name("MPIX_Query_cuda_support")
        ('MPIABI_Send', 'MPIXABI_Query_cuda_support')
    """
    return re.sub(r"^MPI(X?)_", r"MPI\1ABI_", name)


def main(checkout: Path) -> None:
    own = (SOURCES / "mpi_library.cc").read_text()
    defined = set(re.findall(r"\bint (MPIABI_\w+)\(", own))
    defined |= {f"MPIABI_{name}" for name in re.findall(r"^VALUE\((\w+),", own, re.M)}
    lists = checkout / "mpiabi"
    constants = runpy.run_path(str(lists / "mpi_constants.py"))["constants"]
    functions = runpy.run_path(str(lists / "mpi_functions.py"))["functions"]
    lines = [f"CONSTANT({abi_name(entry[1])})" for entry in constants]
    lines += [f"FUNCTION({abi_name(entry[1])})" for entry in functions]
    kept = [line for line in lines if line.split("(")[1][:-1] not in defined]
    (SOURCES / "mpi_names.h").write_text(HEAD + "\n".join(kept) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
