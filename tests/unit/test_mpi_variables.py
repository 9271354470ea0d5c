"""Tests of the variables by which jaxlib loads libringjax_mpi.so."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from ringjax.__main__ import main
from ringjax.run import options
from ringjax.settings import mpi_library

ON = {"RINGJAX_JAX_COLLECTIVES": "1"}


def test_the_library_is_set_for_tested_versions_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert mpi_library.problem() == ""
    assert mpi_library.variables(ON) == {"MPITRAMPOLINE_LIB": str(mpi_library.path())}
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.0")
    assert mpi_library.variables(ON) == {}
    assert "jaxlib 0.13.0 was not tested" in mpi_library.problem()


def test_the_library_needs_jaxlib_and_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "path", lambda: Path("/nowhere/lib.so"))
    assert mpi_library.problem() == "/nowhere/lib.so is missing: reinstall ringjax"
    assert mpi_library.variables(ON) == {}

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert mpi_library.problem() == "jaxlib is not installed"


@pytest.mark.parametrize("text", ["", "0", "no", "perhaps"])
def test_nothing_is_set_unless_it_is_wanted(text: str) -> None:
    assert mpi_library.variables({"RINGJAX_JAX_COLLECTIVES": text}) == {}


@pytest.mark.parametrize(
    ("size", "switch", "wanted"),
    [("2", "", True), ("1", "", False), ("2", "0", False), ("some", "", False)],
)
def test_groups_want_it_by_default(size: str, switch: str, wanted: bool) -> None:
    groups = {"RINGJAX_GROUP_SIZE": size, "RINGJAX_JAX_COLLECTIVES": switch}
    assert mpi_library.is_wanted(groups) == wanted
    assert bool(mpi_library.variables(groups)) == wanted


def test_another_library_of_the_user_stays() -> None:
    assert mpi_library.variables(ON | {"MPITRAMPOLINE_LIB": "/other.so"}) == {}


@pytest.mark.parametrize(
    ("words", "found"),
    [("", None), ("--jax-collectives", "1"), ("--no-jax-collectives", "0")],
)
def test_the_option_sets_the_variable(words: str, found: str | None) -> None:
    args = options.parse([*words.split(), "-np", "2", "true"], "0")
    assert options.environment(args).get("RINGJAX_JAX_COLLECTIVES") == found


def test_a_command_prints_the_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["jax-collectives"]) == 0
    assert capsys.readouterr().out == (
        "export RINGJAX_JAX_COLLECTIVES=1\n"
        f"export MPITRAMPOLINE_LIB={mpi_library.path()}\n"
    )
    assert main(["jax-collectives", "now"]) == 2
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.0")
    assert main(["jax-collectives"]) == 1
    assert "jaxlib 0.9.0 was not tested" in capsys.readouterr().err
