"""Tests of the SBOM of a wheel, which the build writes and release/check.py requires.

`make wheels` checks the SBOM of real wheels, and validates it by CycloneDX's schema.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.launch import ROOT

SCRIPT = ROOT / "release" / "sbom.py"
POLICY = "nanobind/ext/robin_map/include/tsl/robin_growth_policy.h"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("release.check")
    monkeypatch.setattr(module, "schema_error", lambda text: None)
    return module


def _packages(folder: Path) -> Path:
    """Makes those files of nanobind 3.1.0 that the script reads."""
    policy = folder / POLICY
    policy.parent.mkdir(parents=True)
    names = ("MAJOR 1", "MINOR 4", "PATCH 0")
    policy.write_text("".join(f"#define TSL_RH_VERSION_{name}\n" for name in names))
    (folder / "nanobind" / "__init__.py").touch()
    facts = folder / "nanobind-3.1.0.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: nanobind\nVersion: 3.1.0\n")
    return folder


def _written(
    folder: Path,
    compiler: tuple[str, str] = ("Clang", "22.1.8"),
    native: bytes = b"",
    origin: str = "nvcc 13.0",
) -> str:
    folder.mkdir()
    packages = _packages(folder / "packages")
    code, extension, out = (folder / n for n in ("code.cc", "native.so", "out.json"))
    code.write_text(f'std::string_view DeviceCodeOrigin() {{ return "{origin}"; }}\n')
    extension.write_bytes(native)
    words = [sys.executable, SCRIPT, "--version", "0.1.0", "--compiler", *compiler]
    words += ["--device-code", code, "--native", extension, out]
    subprocess.run(words, env={"PYTHONPATH": str(packages)}, check=True, timeout=50)
    return out.read_text()


def _parts(text: str) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads(text)["components"]}


def test_the_sbom_lists_all_components(tmp_path: Path) -> None:
    text = _written(tmp_path / "a")
    said = json.loads(text)
    assert (said["bomFormat"], said["specVersion"]) == ("CycloneDX", "1.6")
    assert said["metadata"]["component"]["purl"] == "pkg:pypi/ringjax@0.1.0"
    parts = _parts(text)
    assert {name: p["version"] for name, p in parts.items()} == {
        "nanobind": "3.1.0",
        "robin-map": "1.4.0",
        "XLA FFI headers": version("jaxlib"),
        "Clang": "22.1.8",
        "libc++": "22.1.8",
        "nvcc": "13.0",
    }
    excluded = {name for name, p in parts.items() if p["scope"] == "excluded"}
    assert excluded == {"Clang", "nvcc"}
    (depends,) = said["dependencies"]
    assert set(depends["dependsOn"]) == {p["bom-ref"] for p in parts.values()}


def test_equal_builds_have_equal_sboms(tmp_path: Path) -> None:
    text = _written(tmp_path / "a")
    assert text == _written(tmp_path / "another folder")
    assert str(tmp_path) not in text


def test_a_dynamically_linked_runtime_is_not_listed(tmp_path: Path) -> None:
    needed = b"\0libm.so.6\0libstdc++.so.6\0"
    parts = _parts(_written(tmp_path / "a", ("GNU", "14.2.1"), needed))
    assert "libstdc++" not in parts and parts["GNU"]["version"] == "14.2.1"
    assert "libstdc++" in _parts(_written(tmp_path / "b", ("GNU", "14.2.1")))


def test_nvcc_is_listed_only_with_device_code(tmp_path: Path) -> None:
    assert "nvcc" not in _parts(_written(tmp_path / "a", origin="none"))


def _wheel(folder: Path, text: str = "", version: str = "0.1.0") -> Path:
    file = folder / f"ringjax-{version}-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ringjax/py.typed", "")
        if text:
            archive.writestr("ringjax-0.1.0.dist-info/sboms/", "")
            archive.writestr("ringjax-0.1.0.dist-info/sboms/ringjax.cdx.json", text)
    return file


def test_a_wheel_without_a_matching_sbom_is_refused(
    check: ModuleType, tmp_path: Path
) -> None:
    text = _written(tmp_path / "a")
    check.check_sbom(_wheel(tmp_path, text))
    with pytest.raises(AssertionError, match="no list"):
        check.check_sbom(_wheel(tmp_path))
    with pytest.raises(AssertionError):
        check.check_sbom(_wheel(tmp_path, text, "0.2.0"))
    other = text.replace('"nanobind"', '"pybind11"')
    with pytest.raises(AssertionError, match="lacks .*nanobind"):
        check.check_sbom(_wheel(tmp_path, other))


def test_an_sbom_that_violates_the_schema_is_refused(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "schema_error", lambda text: "no such field")
    with pytest.raises(AssertionError, match="no such field"):
        check.check_sbom(_wheel(tmp_path, _written(tmp_path / "a")))
