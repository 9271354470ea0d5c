"""The library that jaxlib loads as MPI, by which ringjax carries JAX's collectives.

jaxlib reads MPITRAMPOLINE_LIB when it is imported, and ends the process if it needs a
name that the library lacks. So the variable is set for tested versions only.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ringjax.settings import parsers

VARIABLE = "MPITRAMPOLINE_LIB"
SWITCH, GROUPS = "RINGJAX_JAX_COLLECTIVES", "RINGJAX_GROUP_SIZE"
_OLDEST, _BEFORE = (0, 10, 2), (0, 13)  # the versions of jaxlib that were tested


def path() -> Path:
    """Returns the path of the library in this installation of ringjax."""
    from ringjax import _native  # here, because ringrun must start fast

    return Path(_native.__file__).parent / "libringjax_mpi.so"


def problem() -> str:
    """Returns why jaxlib must not load the library here, or "" if it may."""
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return "jaxlib is not installed"
    if not is_tested(version):
        return f"jaxlib {version} was not tested with this version of ringjax"
    return "" if path().is_file() else f"{path()} is missing: reinstall ringjax"


def is_tested(version: str) -> bool:
    """Returns whether the library was tested with this version of jaxlib.

    Example:
        >>> is_tested("0.10.2"), is_tested("0.12.0.1"), is_tested("0.13.0")
        (True, True, False)
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    return _OLDEST <= numbers < _BEFORE


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what a program's environment lacks for JAX's collectives on ringjax.

    Returns nothing unless `is_wanted`, or if the environment names another library.
    `problem` says why jaxlib keeps its own collectives otherwise.

    Example:
        >>> variables({}), variables({"RINGJAX_JAX_COLLECTIVES": "0"})
        ({}, {})
    """
    if not is_wanted(environ) or environ.get(VARIABLE) or problem():
        return {}
    return {VARIABLE: str(path())}


def main(words: Sequence[str]) -> int:
    """Prints the variables as commands of a shell, for launchers other than ringrun."""
    if words:
        print('usage: eval "$(ringjax jax-collectives)"', file=sys.stderr)
        return 2
    if why := problem():
        print(f"ringjax jax-collectives: {why}", file=sys.stderr)
        return 1
    for name, value in {SWITCH: "1", VARIABLE: str(path())}.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Returns whether RINGJAX_JAX_COLLECTIVES is true, or unset in a job of groups.

    Example:
        >>> is_wanted({}), is_wanted({"RINGJAX_GROUP_SIZE": "2"})
        (False, True)
    """
    try:
        if text := environ.get(SWITCH, ""):
            return parsers.boolean(text)
        return int(environ.get(GROUPS) or 1) > 1
    except ValueError:
        return False  # ringjax.init reports a wrong value
