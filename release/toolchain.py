"""The compiler of the wheels: zig's clang and libc++, from the package index.

One compiler makes the code of both processors, against glibc 2.28, on any machine. Not
for everyday builds: those take the machine's own compiler.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Debian 10, RHEL 8, Ubuntu 20.04 and all that came later.
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")


def zig() -> Path:
    """The binary in the installed package ziglang.

    Raises:
        FileNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("ziglang")
    for folder in (found and found.submodule_search_locations) or ():
        return Path(folder) / "zig"
    raise FileNotFoundError("ziglang is not installed: pip install ziglang")


def write(machine: str, folder: Path) -> dict[str, str]:
    """Writes cc, c++, ar and ranlib for `machine`; returns variables that name them.

    They are scripts, because build systems take a program and not a command, and call
    the binary, because nothing can import ziglang inside an isolated build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = f"-target {machine}-linux-gnu.{GLIBC}"
    for name in ("cc", "c++", "ar", "ranlib"):
        script = folder / name
        words = f"{name} {target}" if name in ("cc", "c++") else name
        script.write_text(f'#!/bin/sh\nexec "{zig()}" {words} "$@"\n')
        script.chmod(0o755)
    tools = f"-DCMAKE_AR={folder}/ar -DCMAKE_RANLIB={folder}/ranlib"
    return {"CC": f"{folder}/cc", "CXX": f"{folder}/c++", "CMAKE_ARGS": tools}


def target_python(machine: str, suffix: str) -> dict[str, str]:
    """What has this machine's Python name a module and a wheel of another one's."""
    if machine == os.uname().machine:
        return {}
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
    }
