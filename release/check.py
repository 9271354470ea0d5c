"""Looks at the files of a release, and tries them where nothing else is.

    python -m release.check [--dist DIST] [--again] [--pythons 3.11 3.12 3.13]

Run by `make wheels`. What auditwheel, abi3audit, twine and check-wheel-contents say; no
path of this machine inside; not too large; whole, with a list of what it is made of;
conda's recipe can be rendered. Then each Python installs its wheel into a bare
environment and trains on two ranks, and the first one runs tests and a benchmark of the
sdist. `--again` builds everything a second time, in another folder, and compares the
bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

from release import sbom, toolchain, wheels
from release import version as release_version

MOST_BYTES = 2_500_000
EXPECTED = {"ringjax/py.typed", "ringjax/_native.pyi", "ringjax/run/__main__.py"}
SDIST = ("tests/conftest.py", "benchmarks/allreduce.py", "docs/conf.py", "Makefile")
# What every wheel is made of, beside its compilers and their runtimes.
PARTS = {"nanobind", "robin-map", "XLA FFI headers"}
BIN = Path(sys.executable).parent
# A few tests of the sdist, alone and on ranks, that no framework but JAX is needed for.
TESTS = ["unit/test_documents.py", "unit/test_site.py", "bench/test_benchmarks.py"]
TESTS += ["ranks/jax/test_barrier.py", "ranks/jax/test_sync.py"]
BENCHMARK = "-np 2 --peers ringjax jax-gloo --sizes 64K --no-model --no-tcp --rounds 2"


def output(*words: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; its errors end the check."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}")
    return done.stdout


def check_platform(wheel: Path) -> None:
    """It runs where its name says: glibc, and nothing else that is not there."""
    said = output(BIN / "auditwheel", "show", wheel)
    found = re.search(r'constrains the platform tag to\s+"manylinux_2_(\d+)_', said)
    least = found or re.search(r'platform tag:\s+"manylinux_2_(\d+)_', said)
    assert least, said
    assert int(least[1]) <= int(toolchain.GLIBC.partition(".")[2]), said


def check_abi(wheel: Path) -> None:
    """The stable ABI's wheel asks nothing of Python that is not in it."""
    if "-abi3-" in wheel.name:
        output(BIN / "abi3audit", "--strict", wheel)


def check_contents(wheel: Path) -> None:
    """Whole, small, and without a folder of the machine that built it."""
    output(BIN / "check-wheel-contents", wheel)
    assert wheel.stat().st_size <= MOST_BYTES, f"{wheel.name} is too large"
    homes = [os.fsencode(p) for p in (wheels.ROOT, Path.home(), tempfile.gettempdir())]
    homes += [b"/site-packages/", b"/build/release/"]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert names >= EXPECTED, f"{wheel.name} lacks {EXPECTED - names}"
        (native,) = [name for name in names if name.endswith(".so")]
        inside = archive.read(native)
    for home in homes:
        assert home not in inside, f"{native} in {wheel.name} knows {home!r}"


def schema_error(text: str) -> object:
    """What CycloneDX's own schema finds in a document; None: nothing."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    known = SchemaVersion.from_version(sbom.SPEC)
    return JsonStrictValidator(known).validate_str(text)


def check_sbom(wheel: Path) -> None:
    """It lists what is inside, in words that others' tools can read."""
    with zipfile.ZipFile(wheel) as archive:
        found = [n for n in archive.namelist() if ".dist-info/sboms/" in n]
        files = [name for name in found if not name.endswith("/")]
        assert len(files) == 1, f"{wheel.name} has {files or 'no list'} of its parts"
        text = archive.read(files[0]).decode()
    error = schema_error(text)
    assert error is None, f"{files[0]} in {wheel.name}: {error}"
    said = json.loads(text)
    assert said["metadata"]["component"]["version"] == wheel.name.split("-")[1]
    missing = PARTS - {part["name"] for part in said["components"]}
    assert not missing, f"{files[0]} in {wheel.name} lacks {missing}"


def check_sdist(sdist: Path) -> None:
    """The tests and the benchmarks are in it, with all that they read."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SDIST if name not in names]
    assert not missing, f"the sdist lacks {missing}"


def check_same_bytes(dist: Path, work: Path) -> None:
    """The same commit, built again in another folder, has the same bytes."""
    again = work / "again"
    wheels.build(again, work, "second")
    for file in sorted(dist.iterdir()):
        first, second = file.read_bytes(), (again / file.name).read_bytes()
        assert first == second, f"{file.name} differs when it is built again"


def check_recipe(recipe: Path) -> None:
    """conda's recipe can be rendered for all Pythons and processors of the wheels."""
    import rattler_build

    parsed = rattler_build.Stage0Recipe.from_file(recipe)
    pythons = [f"{version}.*" for version in wheels.PYTHONS.values()]
    variants = {"python": pythons, "c_stdlib": ["sysroot"], "cxx_compiler": ["gxx"]}
    for machine, compiles_cuda in (("linux-64", True), ("linux-aarch64", False)):
        platform = rattler_build.PlatformConfig(target_platform=machine)
        rendered = parsed.render(
            rattler_build.VariantConfig(variants),
            rattler_build.RenderConfig(platform=platform),
        )
        assert len(rendered) == len(pythons), f"{recipe.name} makes {rendered}"
        for made in rendered:
            said = made.recipe.to_dict()
            assert said["package"]["version"] == release_version.check()
            tools = said["requirements"]["build"]
            assert f"gxx_{machine}" in tools
            nvcc = any(tool.startswith("cuda-nvcc") for tool in tools)
            assert nvcc == compiles_cuda, tools


def start_program() -> str:
    """The first program of the documentation."""
    page = (wheels.ROOT / "docs" / "start" / "first-program.md").read_text()
    found = re.search(r"(?ms)^```python\n(.*?)^```", page)
    assert found
    return found[1]


def check_install(dist: Path, version: str, work: Path) -> None:
    """A bare environment of this Python installs its wheel and trains on two ranks."""
    python = wheels.interpreter(version)
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    (wheel,) = dist.glob(f"ringjax-*-{tag}-*_{os.uname().machine}.whl")
    folder = work / f"bare{version}"
    output(python, "-m", "venv", "--clear", folder)
    began = time.monotonic()
    output(folder / "bin" / "pip", "--disable-pip-version-check", "install", wheel)
    installed = time.monotonic()
    program = folder / "train.py"
    program.write_text(start_program())
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [folder / "bin" / "ringrun", "-np", "2", "python", program],
        env=env | {"HOME": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "loss 0.0" in done.stdout, done.stdout
    seconds = f"{installed - began:.0f} s to install, "
    seconds += f"{time.monotonic() - installed:.0f} s to train"
    print(f"Python {version}: {wheel.name}, {seconds}", flush=True)


def check_sdist_runs(sdist: Path, version: str, work: Path) -> None:
    """Tests and a benchmark of the sdist, with the wheel's compiled module."""
    source, bare = wheels.unpack(sdist, work / "sdist"), work / f"bare{version}"
    (native,) = bare.glob("lib/*/site-packages/ringjax/_native*.so")
    shutil.copy(native, source / "ringjax")
    python = bare / "bin" / "python"
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["test"]
    tools = [w for w in wanted if re.match("pytest|hypothesis|rich|flax", w)]
    output(python, "-m", "pip", "--disable-pip-version-check", "install", *tools)
    tests = [source / "tests" / name for name in TESTS]
    said = output(python, "-P", "-m", "pytest", "-q", *tests, cwd=source)
    said += output(python, "-m", "benchmarks.allreduce", *BENCHMARK.split(), cwd=source)
    passed = re.search(r"\d+ passed", said)
    assert passed and "jax-gloo" in said, said
    print(f"{sdist.name}: {passed[0]}, and a benchmark", flush=True)


def main() -> None:
    """All checks, the quick ones first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=wheels.ROOT / "dist")
    parser.add_argument("--work", type=Path, default=wheels.ROOT / "build" / "release")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--pythons", nargs="*", default=["3.11", "3.12", "3.13"])
    args = parser.parse_args()
    dist, work = args.dist.resolve(), args.work.resolve()
    (sdist,) = dist.glob("*.tar.gz")
    made = sorted(dist.glob("*.whl"))
    assert made, f"no wheel in {dist}"
    check_recipe(wheels.ROOT / "release" / "conda" / "recipe.yaml")
    check_sdist(sdist)
    output(BIN / "twine", "check", "--strict", sdist, *made)
    checks: tuple[Callable[[Path], None], ...]
    checks = (check_platform, check_abi, check_contents, check_sbom)
    for wheel in made:
        for check in checks:
            check(wheel)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {digest}", flush=True)
    for version in args.pythons:
        check_install(dist, version, work)
    if args.pythons:
        check_sdist_runs(sdist, args.pythons[0], work)
    if args.again:
        check_same_bytes(dist, work)
        print("built again: the same bytes")


if __name__ == "__main__":
    main()
