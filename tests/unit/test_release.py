"""Tests of the release: equal versions, pinned tools, and checks that can fail.

These tests build no wheel, because that takes minutes. `make wheels` builds wheels.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from support.launch import ROOT, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("release")


@pytest.fixture
def check(release: ModuleType) -> ModuleType:
    return importlib.import_module("release.check")


@pytest.fixture
def toolchain(release: ModuleType) -> ModuleType:
    return importlib.import_module("release.toolchain")


@pytest.fixture
def version(release: ModuleType) -> ModuleType:
    return importlib.import_module("release.version")


@pytest.fixture
def wheels(release: ModuleType) -> ModuleType:
    return importlib.import_module("release.wheels")


def test_all_files_have_one_version(version: ModuleType) -> None:
    wanted = PROJECT["project"]["version"]
    assert version.check() == version.check(f"v{wanted}") == wanted


@pytest.mark.parametrize("tag", ["v9.9.9", "release"])
def test_another_tag_is_refused(version: ModuleType, tag: str) -> None:
    with pytest.raises(ValueError, match=rf"the tag {tag.removeprefix('v')}"):
        version.check(tag)
    with pytest.raises(ValueError, match=r"is v\d.*, not"):
        version.check(PROJECT["project"]["version"])


VERSIONED, RECIPE = ("CHANGELOG.md", "CITATION.cff"), "release/conda/recipe.yaml"


@pytest.mark.parametrize("file", [*VERSIONED, RECIPE])
def test_a_file_with_another_version_is_reported(
    version: ModuleType, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", *VERSIONED, RECIPE):
        text = (ROOT / name).read_text()
        if name == file:
            text = text.replace(PROJECT["project"]["version"], "0.0.7")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(version, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=rf"{file} 0\.0\.7"):
        version.check()


def test_build_requirements_are_pinned(wheels: ModuleType) -> None:
    lines = wheels.CONSTRAINTS.read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    for wanted in wheels.requirements():
        name = re.split(r"[<>=]", wanted)[0]
        assert name in pins or re.fullmatch(r"[\w-]+==\d[\w.]*\d", wanted), wanted
    assert {"ziglang", "cmake", "ninja", "auditwheel"} <= pins.keys()


def _as_conda(wanted: str) -> str:
    """Converts a requirement such as `jax>=1,<2` to conda's form `jax >=1,<2`."""
    name, limits = re.fullmatch(r"([\w-]+)(.*)", wanted).groups()  # type: ignore[union-attr]
    return f"{name} {limits}".strip()


def test_the_conda_recipe_matches_pyproject() -> None:
    recipe = yaml.safe_load((ROOT / RECIPE).read_text())
    project, wanted = PROJECT["project"], recipe["requirements"]
    of_build = map(_as_conda, PROJECT["build-system"]["requires"])
    assert {*of_build, "python", "pip"} == {*wanted["host"]}
    assert {*map(_as_conda, project["dependencies"]), "python"} == {*wanted["run"]}
    cmake = PROJECT["tool"]["scikit-build"]["cmake"]["version"]
    assert f"cmake {cmake}" in wanted["build"]
    least = project["requires-python"].removeprefix(">=")
    assert f'match(python, "<{least}")' in recipe["build"]["skip"]
    about = recipe["about"]
    assert about["summary"] == project["description"]
    assert about["license"] == project["license"]
    assert about.get("repository") == project["urls"].get("Source")


@pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")
def test_workflows_pin_actions_and_use_no_secrets() -> None:
    for workflow in WORKFLOWS:
        text = workflow.read_text()
        actions = re.findall(r"uses: (\S+)", text)
        assert actions
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
        assert text.count("actions/checkout@") == text.count("credentials: false")
        assert "secrets." not in text
        assert text.count("id-token: write") == (workflow.name == "release.yml")
        # An outsider can choose text such as the name of a tag, so commands must not
        # contain such text.
        runs = re.findall(r"(?m)^ +- run: (?:[|>].*\n((?: {10}.*\n)+)|(.*))", text)
        assert runs and not any("{{ github." in p for run in runs for p in run)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_toolchain_calls_zig_with_the_target(
    toolchain: ModuleType, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\necho "$@"\n')
    zig.chmod(0o755)
    monkeypatch.setattr(toolchain, "zig", lambda: zig)
    env = toolchain.write(machine, tmp_path / "tools")
    said = subprocess.check_output([env["CXX"], "-c", "x.cc"], text=True)
    assert said.split() == f"c++ -target {machine}-linux-gnu.2.28 -c x.cc".split()
    said = subprocess.check_output([tmp_path / "tools" / "ar", "rc"], text=True)
    assert said.split() == ["ar", "rc"]


def test_a_missing_python_is_reported(wheels: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"Python 3\.99 is needed"):
        wheels.interpreter("3.99")
    this = "{}.{}".format(*sys.version_info)
    assert wheels.interpreter(this)


def _wheel(folder: Path, native: bytes, without: str = "") -> Path:
    file = folder / "ringjax-1-cp312-abi3-manylinux_2_28_x86_64.whl"
    names = {"ringjax/py.typed", "ringjax/_native.pyi", "ringjax/run/__main__.py"}
    with zipfile.ZipFile(file, "w") as archive:
        for name in names - {without}:
            archive.writestr(name, "")
        archive.writestr("ringjax/_native.abi3.so", native)
    return file


def test_a_wheel_with_a_local_path_or_a_missing_file_is_refused(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "output", lambda *words: "")
    check.check_contents(_wheel(tmp_path, b"fine"))
    with pytest.raises(AssertionError, match="knows"):
        check.check_contents(_wheel(tmp_path, b"a" + bytes(ROOT) + b"/xla_ext"))
    with pytest.raises(AssertionError, match=r"lacks .*py\.typed"):
        check.check_contents(_wheel(tmp_path, b"fine", without="ringjax/py.typed"))


def test_a_wheel_that_is_too_large_is_refused(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "output", lambda *words: "")
    monkeypatch.setattr(check, "MOST_BYTES", 1000)
    with pytest.raises(AssertionError, match="too large"):
        check.check_contents(_wheel(tmp_path, bytes(1000)))


@pytest.mark.parametrize(("needed", "fine"), [(17, True), (28, True), (35, False)])
def test_a_wheel_that_needs_a_newer_glibc_is_refused(
    check: ModuleType, needed: int, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        f'This constrains the platform tag to\n"manylinux_2_{needed}_x86_64". In order'
    )
    monkeypatch.setattr(check, "output", lambda *words: said)
    if fine:
        check.check_platform(Path("x.whl"))
    else:
        with pytest.raises(AssertionError, match="manylinux_2_35"):
            check.check_platform(Path("x.whl"))


def test_an_sdist_without_tests_is_refused(check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "ringjax-1.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("ringjax-1/Makefile"), io.BytesIO())
    with pytest.raises(AssertionError, match="tests/conftest"):
        check.check_sdist(file)


def test_the_checked_program_is_that_of_the_documentation(check: ModuleType) -> None:
    assert "ringjax.allreduce_grads()" in check.start_program()


@pytest.fixture
def elsewhere(release: ModuleType) -> ModuleType:
    return importlib.import_module("release.elsewhere")


def test_wheels_are_checked_on_other_pythons_and_machines(
    elsewhere: ModuleType,
) -> None:
    places = {str(place): place.tag for place in elsewhere.PLACES}
    assert places == {
        "python3.14-x86_64": "cp312-abi3",
        "python3.11-aarch64": "cp311-cp311",
        "python3.13-aarch64": "cp312-abi3",
    }


def test_pythons_of_other_machines_run_in_qemu(
    elsewhere: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "fetch", lambda *words: tmp_path / "tools")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "ld-linux-any.so.1").touch()
    for place in elsewhere.PLACES:
        file = elsewhere.interpreter(place, tmp_path / "root", tmp_path, tmp_path)
        emulated = f"qemu-{place.machine}-static" in file.read_text()
        assert emulated == (place.machine != os.uname().machine)
        assert file.read_text().endswith(f'usr/bin/python{place.python} "$@"\n')


def test_the_program_for_two_ranks_passes() -> None:
    words = ["-m", "ringjax.run", "-np", "2", sys.executable]
    done = subprocess.run(
        [sys.executable, *words, ROOT / "release" / "two_ranks.py"],
        env=environment("two ranks", {}),
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": right (") == 2
