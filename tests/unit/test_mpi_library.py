"""Tests of libringjax_mpi.so against the installed jaxlib.

jaxlib resolves all names of MPItrampoline's ABI when it is imported, and ends the
process if one is missing. So a version of jaxlib that needs another name must fail
here.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from ringjax import _native

LIBRARY = Path(_native.__file__).parent / "libringjax_mpi.so"


def needed_names() -> list[str]:
    """Returns the names that jaxlib looks up."""
    found = [f for f in files("jaxlib") or [] if f.name == "libjax_common.so"]
    text = Path(found[0].locate()).read_bytes()
    names = re.findall(rb"\0((?:MPIX?ABI_|mpiwrapper_|mpiabi_version_)\w+)(?=\0)", text)
    return sorted({name.decode() for name in names})


def test_the_library_has_every_name_that_jaxlib_needs() -> None:
    names = needed_names()
    assert len(names) > 600
    library = ctypes.CDLL(str(LIBRARY))
    assert [name for name in names if not hasattr(library, name)] == []


def test_the_library_needs_no_cpp_library() -> None:
    text = LIBRARY.read_bytes()
    assert b"libstdc++" not in text and b"libgcc" not in text


def test_jaxlib_loads_the_library() -> None:
    program = "import jax; print(jax.numpy.arange(3).sum())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {"MPITRAMPOLINE_LIB": str(LIBRARY), "MPITRAMPOLINE_VERBOSE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "3\n"
    assert "Initialization complete" in done.stderr


def test_calls_say_what_to_set_while_ringjax_is_not_in_use() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    size, group = ctypes.c_int(7), ctypes.c_uint64(7)
    assert library.MPIABI_Comm_size(ctypes.c_uint64(1), ctypes.byref(size)) != 0
    assert size.value == 1
    assert library.MPIABI_Comm_split(ctypes.c_uint64(1), 0, 0, ctypes.byref(group)) != 0
    text = ctypes.create_string_buffer(1024)
    assert library.MPIABI_Error_string(1, text, ctypes.byref(size)) == 0
    assert text.value.startswith(b"ringjax carries JAX's collectives only if")
    assert size.value == len(text.value)


def test_a_library_that_jaxlib_has_not_loaded_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "libringjax_mpi.so"
    other.write_bytes(LIBRARY.read_bytes())
    with pytest.raises(RuntimeError, match="MPITRAMPOLINE_LIB must name it before"):
        _native.mpi_install(str(other))
