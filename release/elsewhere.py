"""Tries the wheels with Pythons and on a processor that this machine does not have.

    python -m release.elsewhere [--dist DIST] [--only NAME ...]

Run by `make wheels-elsewhere`, on a Debian machine after `make wheels`. A place is the
files of a Debian suite, fetched by this machine's apt and unpacked into a folder: its
loader starts its Python, under qemu if the processor is another one. No chroot.
Emulation does not show what a weaker order of memory would.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from release import wheels

PROGRAM = Path(__file__).with_name("two_ranks.py")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
SECONDS = 1500


@dataclass(frozen=True)
class Place:
    """A Python of a Debian suite, on a processor."""

    suite: str
    machine: str
    python: str

    def __str__(self) -> str:
        return f"python{self.python}-{self.machine}"

    @property
    def tag(self) -> str:
        """What the name of its wheel has."""
        return "cp311-cp311" if self.python == "3.11" else "cp312-abi3"


PLACES = (
    Place("sid", "x86_64", "3.14"),
    Place("bookworm", "aarch64", "3.11"),
    Place("trixie", "aarch64", "3.13"),
)


def mirror() -> str:
    """Where this machine's apt has Debian from."""
    asked = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(SITE)"]
    for line in subprocess.check_output(asked, text=True).splitlines():
        if line.startswith("Debian Debian "):
            return line.split()[2]
    raise SystemExit("apt knows no Debian: this runs on a Debian machine only")


def fetch(folder: Path, suite: str, machine: str, packages: Sequence[str]) -> Path:
    """Unpacks Debian's packages and what they need below `folder`; returns where."""
    root = folder / "root"
    if (root / "complete").exists():
        return root
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "installed").touch()  # nothing is
    source = folder / "suite.list"
    source.write_text(f"deb [signed-by={KEYRING}] {mirror()} {suite} main\n")
    options = {
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "installed",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": source,
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Architecture": DEBIAN[machine],
        "APT::Architectures": DEBIAN[machine],
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
    wheels.run([*apt, "update"])
    how = ["--yes", "--download-only", "--no-install-recommends"]
    wheels.run([*apt, "install", *how, *packages])
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        wheels.run(["dpkg-deb", "--extract", package, root])
    (root / "complete").touch()
    return root


def libraries(place: Place, folder: Path) -> Path:
    """What a wheel needs of the package index, for that Python; returns the folder."""
    site, files = folder / "site", folder / "wheels"
    if not (site / "complete").exists():
        glibcs = (28, 27, 17)
        platforms = [f"manylinux_2_{minor}_{place.machine}" for minor in glibcs]
        platforms.append(f"manylinux2014_{place.machine}")
        number = place.python.replace(".", "")
        words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        words += ["--quiet", "--only-binary=:all:", "--python-version", place.python]
        words += ["--implementation", "cp"]
        words += [f"--abi={abi}" for abi in (f"cp{number}", "abi3", "none")]
        words += [f"--platform={platform}" for platform in platforms]
        text = (wheels.ROOT / "pyproject.toml").read_text()
        needed = tomllib.loads(text)["project"]["dependencies"]
        wheels.run([*words, "--dest", files, *needed])
        for file in files.glob("*.whl"):
            with zipfile.ZipFile(file) as archive:
                archive.extractall(site)
        (site / "complete").touch()
    return site


def interpreter(place: Place, root: Path, folder: Path, work: Path) -> Path:
    """A command that starts the place's Python."""
    loader = next(root.glob("**/ld-linux-*.so.*"))
    found = [root / f"{at}lib/{place.machine}-linux-gnu" for at in ("", "usr/")]
    words = [str(loader), "--library-path", ":".join(map(str, found))]
    if place.machine != os.uname().machine:
        here = os.uname().machine
        tools = fetch(work / "qemu", "bookworm", here, ["qemu-user-static"])
        words.insert(0, str(tools / f"usr/bin/qemu-{place.machine}-static"))
    words.append(str(root / f"usr/bin/python{place.python}"))
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    command.chmod(0o755)
    return command


def check(place: Place, dist: Path, work: Path) -> str:
    """Two ranks of the place's wheel; returns what the first one says."""
    folder = work / str(place)
    packages = [f"python{place.python}", "libstdc++6"]
    root = fetch(folder, place.suite, place.machine, packages)
    site = folder / "with-wheel"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(libraries(place, folder), site, symlinks=True)
    (wheel,) = dist.glob(f"ringjax-*-{place.tag}-*_{place.machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    python = interpreter(place, root, folder, work)
    # ringrun of this machine's wheel starts ranks of the other's.
    launcher = work.parent / "bare3.11" / "bin" / "ringrun"
    env = {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(site)}
    words = [launcher, "-np", "2", "--start-timeout", "600", "env"]
    words += [f"{name}={value}" for name, value in env.items()]
    done = subprocess.run(
        [*map(str, words), str(python), str(PROGRAM)],
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right (") == 2, done.stdout
    return f"{wheel.name}: {done.stdout.splitlines()[0]}"


def main() -> None:
    """All places, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=wheels.ROOT / "dist")
    parser.add_argument("--work", type=Path, default=wheels.ROOT / "build" / "release")
    parser.add_argument("--only", nargs="*", choices=[str(p) for p in PLACES])
    args = parser.parse_args()
    for place in PLACES:
        if not args.only or str(place) in args.only:
            work = args.work.resolve() / "elsewhere"
            print(check(place, args.dist.resolve(), work), flush=True)


if __name__ == "__main__":
    main()
