"""Builds the stubs of CUDA's driver and of NCCL, and makes processes load them.

Tests on the stubs are not GPU tests. They check how ringjax calls CUDA and NCCL, and
prove nothing about CUDA or NCCL. tests/cuda_stub/README.md describes the stubs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "cuda_stub"
_HEADERS = ROOT / "xla_ext"
_LIBRARIES = {
    "libcuda.so.1": ("libcuda_stub.cc", "cuda_queues.cc"),
    "libnccl.so.2": ("libnccl_stub.cc", "nccl_groups.cc", "nccl_exchange.cc"),
}
_FLAGS = (
    "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
    # nodelete: threads of the libraries may still run when a process closes them.
    "-Wl,-z,defs", "-Wl,-z,nodelete",
)  # fmt: skip
SETTINGS = frozenset({
    "CUDA_STUB_DELAY_US", "CUDA_STUB_DEVICES", "CUDA_STUB_FAIL", "CUDA_STUB_LOG",
    "CUDA_STUB_UUID", "CUDA_STUB_VERSION",
    "NCCL_STUB_DETECT_DEATH", "NCCL_STUB_FAIL", "NCCL_STUB_INIT_HANG",
    "NCCL_STUB_IN_PROGRESS", "NCCL_STUB_LATENCY_MS", "NCCL_STUB_LOG",
    "NCCL_STUB_MISMATCH", "NCCL_STUB_STALL_SECONDS", "NCCL_STUB_VERSION",
})  # fmt: skip


def compiler() -> str | None:
    """Returns the C++ compiler: $CXX, or the first of the usual names that exists."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def build(cxx: str, flags: tuple[str, ...] = ()) -> Path:
    """Builds both libraries unless equal sources are already built. Returns the folder.

    Args:
      cxx: the path of the compiler.
      flags: more flags for the compiler, such as the flags of a sanitizer.
    """
    cache = Path(tempfile.gettempdir()) / f"ringjax-stubs-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise PermissionError(f"{cache} belongs to somebody else")
    done = cache / _content([cxx, *_FLAGS, *flags])
    if done.is_dir():
        return done
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "lib"
        built.mkdir()
        for library, sources in _LIBRARIES.items():
            command = [
                cxx, *_FLAGS, *flags, f"-Wl,-soname,{library}", f"-I{_HEADERS}",
                *(str(SOURCES / source) for source in sources),
                "-o", str(built / library), "-ldl",
            ]  # fmt: skip
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert run.returncode == 0, f"{library} does not build:\n{run.stderr}"
        try:
            built.rename(done)
        except OSError:
            if not done.is_dir():  # otherwise another process has built it
                raise
    return done


def _content(words: list[str]) -> str:
    """Returns a hash of the command and all source files of the libraries."""
    files = [*SOURCES.glob("*.h"), *SOURCES.glob("*.cc")]
    for pattern in ("cuda/*.[hc]*", "base/*.h", "device/*.h"):
        files += _HEADERS.glob(pattern)
    digest = hashlib.sha256(repr(words).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def _libraries() -> Path | None:
    cxx = compiler()
    return build(cxx) if cxx else None


def stub_environment(**settings: str | float) -> dict[str, str]:
    """Returns variables that make a process load the stubs instead of CUDA and NCCL.

    Skips the test if there is no C++ compiler.

    Args:
      **settings: settings of the stubs, such as `CUDA_STUB_DELAY_US=500`.
    """
    unknown = settings.keys() - SETTINGS
    assert not unknown, f"the stubs have no {sorted(unknown)}"
    libraries = _libraries()
    if libraries is None:
        pytest.skip("no C++ compiler")
    search = [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": ":".join(filter(None, search)),
        "JAX_PLATFORMS": "cpu",
        "RINGJAX_NCCL": str(libraries / "libnccl.so.2"),
        **{name: str(value) for name, value in settings.items()},
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that the stubs wrote to CUDA_STUB_LOG or NCCL_STUB_LOG."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
