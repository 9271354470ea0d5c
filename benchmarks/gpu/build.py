"""Builds and installs this checkout where there may be no network: into a folder.

pyproject.toml pins the tools that build a wheel, and one tool only writes the text for
the package index. A machine without network has other versions and may lack that tool,
so CMake is called directly. An installed ringjax (`make gpu-check
GPU_PYTHON=.venv/bin/python`) is used as it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu.section import missing, section

ROOT = Path(__file__).resolve().parents[2]
# import name -> name of the package for pip
TOOLS = {
    "nanobind": "nanobind>=2.4",
    "jaxlib": "jaxlib (XLA's FFI headers)",
}
PROGRAMS = {"cmake": "cmake>=3.20", "ninja": "ninja", "c++": "g++ 12 or clang 15"}
RUNTIME = ("jax", "numpy", "optax", "cloudpickle", "pytest", "pytest_timeout")
EXAMPLES = ("flax", "sklearn")


def programs_missing() -> list[str]:
    """Returns programs that are neither on PATH nor in this Python's folder."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    names = [n for n in PROGRAMS if shutil.which(n, path=path) is None]
    if os.environ.get("CXX"):
        names = [n for n in names if n != "c++"]
    return names


def without_checkout(environ: Mapping[str, str]) -> dict[str, str]:
    """Removes this checkout from Python's path, where it hides the built ringjax."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [p for p in paths if p and Path(p).resolve() != ROOT]
    return {**environ, "PYTHONPATH": os.pathsep.join(kept)}


def installed() -> str:
    """Returns the folder of an installed ringjax; empty for a bare checkout."""
    code = "import ringjax._native as n; print(n.__file__)"
    env = without_checkout(os.environ)
    found = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return found.stdout.strip() if found.returncode == 0 else ""


def commands(site: Path, work: Path) -> list[list[str]]:
    """Returns the commands of scikit-build-core: configure, build, install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    options = {
        "CMAKE_INSTALL_PREFIX": site,
        "Python_EXECUTABLE": sys.executable,
        "SKBUILD_PROJECT_VERSION": project["version"],
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    return [
        ["cmake", "-S", str(ROOT), "-B", str(work), "-G", "Ninja", *defines],
        ["cmake", "--build", str(work)],
        ["cmake", "--install", str(work)],
    ]


def environment() -> dict[str, str]:
    """Returns an environment with all cores, and with programs next to this Python."""
    beside = str(Path(sys.executable).parent)
    cores = str(len(os.sched_getaffinity(0)))
    return {
        **without_checkout(os.environ),
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
        "CMAKE_BUILD_PARALLEL_LEVEL": cores,
    }


def main() -> None:
    """Builds ringjax unless it is installed. Prints which tools are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    with section() as report:
        report.table("Build", "what", "value")
        report.row("Python", f"{sys.version.split()[0]}, {sys.executable}")
        shutil.rmtree(options.site, ignore_errors=True)
        lacking = [*missing(*RUNTIME), *missing(*EXAMPLES)]
        report.row("packages missing to run all of it", ", ".join(lacking) or "none")
        if where := installed():
            report.row("ringjax", f"installed already: {where}")
            return
        absent = [TOOLS[name] for name in missing(*TOOLS)]
        absent += [PROGRAMS[name] for name in programs_missing()]
        if absent:
            text = f"to build ringjax, {sys.executable} lacks: {', '.join(absent)}"
            report.fail(f"{text}; see benchmarks/gpu/README.md for other ways")
            return
        for name in ("nanobind", "jaxlib"):
            report.row(name, importlib.metadata.version(name))
        started = time.monotonic()
        for words in commands(options.site, options.work / "cmake"):
            code = subprocess.run(
                words, env=environment(), stdin=subprocess.DEVNULL, check=False
            ).returncode
            if code:
                report.fail(f"{' '.join(words[:2])} failed with exit code {code}")
                return
        shutil.copytree(ROOT / "ringjax", options.site / "ringjax", dirs_exist_ok=True)
        report.row("built in", f"{time.monotonic() - started:.0f} s")
        report.row("ringjax", str(options.site))


if __name__ == "__main__":
    main()
