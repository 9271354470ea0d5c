"""Tests of who carries JAX's collectives, and of the client that JAX gets.

The processes are joined by `jax.distributed`, without a launcher. Where they use
ringjax, stand-ins replace the MPI library: Gloo computes, and everything else is real.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from types import SimpleNamespace

import pytest
from support.launch import ROOT

from ringjax.settings import mpi_library
from ringjax.xla import jax_collectives
from ringjax.xla.jax_collectives import device_count, refusal


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the core that counts the calls."""
    calls = list[str]()
    core = SimpleNamespace(mpi_install=calls.append)
    monkeypatch.setattr(jax_collectives, "_mpi", core)
    return calls


def test_ringjax_carries_collectives(installed: list[str]) -> None:
    assert refusal() == ""
    assert installed == [str(mpi_library.path())]


def test_reasons_of_jaxlib_and_of_the_core(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.0")
    assert "jaxlib 0.13.0 was not tested" in refusal()
    assert not installed
    monkeypatch.undo()
    assert "MPITRAMPOLINE_LIB must name it before" in refusal()


def test_the_installed_jax_is_among_the_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = [text for text in project["dependencies"] if text.startswith("jax>")]
    oldest, newer = re.findall(r"[\d.]+", required)
    assert mpi_library.is_tested(oldest) and not mpi_library.is_tested(newer)


@pytest.mark.parametrize(
    ("setting", "flags", "count"),
    [
        (-1, "", 1),
        (3, "", 3),
        (1, "--xla_force_host_platform_device_count=4", 1),
        (-1, "--a=b --xla_force_host_platform_device_count=4", 4),
        (
            -1,
            "--xla_force_host_platform_device_count=4 "
            "--xla_force_host_platform_device_count=2",
            2,
        ),
    ],
)
def test_the_number_of_devices(setting: int, flags: str, count: int) -> None:
    assert device_count(setting, flags) == count
