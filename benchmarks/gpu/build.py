"""Builds and installs this checkout where there may be no network: into a folder.

pyproject.toml pins what a wheel is built with; a bare machine has other versions of the
same tools and cannot fetch. So no isolation and no index: this Python's own tools. An
installed ringjax (`make gpu-check GPU_PYTHON=.venv/bin/python`) is used as it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu.section import missing, section

ROOT = Path(__file__).resolve().parents[2]
# import name -> how pip calls it
TOOLS = {
    "pip": "pip",
    "scikit_build_core": "scikit-build-core>=0.10",
    "nanobind": "nanobind>=2.4",
    "jaxlib": "jaxlib (XLA's FFI headers)",
}
PROGRAMS = {"cmake": "cmake>=3.20", "ninja": "ninja", "c++": "g++ 12 or clang 15"}
RUNTIME = ("jax", "numpy", "optax", "cloudpickle", "pytest", "pytest_timeout")
EXAMPLES = ("flax", "sklearn", "hypothesis")


def programs_missing() -> list[str]:
    """Programs that are neither on PATH nor in this Python's folder or packages."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    names = [n for n in PROGRAMS if shutil.which(n, path=path) is None]
    if os.environ.get("CXX"):
        names = [n for n in names if n != "c++"]
    return [n for n in names if n == "c++" or missing(n)]


def without_checkout(environ: Mapping[str, str]) -> dict[str, str]:
    """Without this checkout on Python's path, where it hides what was built."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [p for p in paths if p and Path(p).resolve() != ROOT]
    return {**environ, "PYTHONPATH": os.pathsep.join(kept)}


def installed() -> str:
    """Where an installed ringjax is; nothing if there is only the checkout."""
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


def command(site: Path, work: Path) -> list[str]:
    """The words of the build."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir"]
    where = ["--target", str(site), "-C", f"build-dir={work / 'cmake'}"]
    return [*pip, *offline, "--root-user-action=ignore", *where, "-v", str(ROOT)]


def environment() -> dict[str, str]:
    """Ninja, all cores, and the programs that pip has put beside this Python."""
    beside = str(Path(sys.executable).parent)
    cores = str(len(os.sched_getaffinity(0)))
    return {
        **without_checkout(os.environ),
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
        "CMAKE_ARGS": os.environ.get("CMAKE_ARGS", "-G Ninja"),
        "CMAKE_BUILD_PARALLEL_LEVEL": cores,
    }


def main() -> None:
    """Builds, unless ringjax is installed; says which tools are missing."""
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
        for name in ("scikit-build-core", "nanobind", "jaxlib"):
            report.row(name, importlib.metadata.version(name))
        started = time.monotonic()
        done = subprocess.run(
            command(options.site, options.work),
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        report.row("built in", f"{time.monotonic() - started:.0f} s")
        if done.returncode:
            report.fail(f"the build failed with exit code {done.returncode}")
        else:
            report.row("ringjax", str(options.site))


if __name__ == "__main__":
    main()
