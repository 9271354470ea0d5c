"""Tests of Horovod's module paths and of the helper functions in these modules."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

import ringjax
from ringjax.common import exceptions, process_sets, util
from ringjax.runner import run


def test_process_set_names_are_ringjaxs() -> None:
    assert process_sets.ProcessSet is ringjax.ProcessSet
    assert process_sets.global_process_set is ringjax.global_process_set
    assert process_sets.add_process_set is ringjax.add_process_set
    assert process_sets.remove_process_set is ringjax.remove_process_set


def test_exceptions_are_ringjaxs() -> None:
    assert exceptions.HorovodInternalError is ringjax.errors.RingjaxError
    assert issubclass(ringjax.errors.PeerLost, exceptions.HorovodInternalError)
    assert exceptions.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    text = exceptions.get_version_mismatch_message("torch", "2.13.0", "2.4.0")
    assert "torch 2.13.0" in text and "2.4.0" in text
    assert text == str(
        exceptions.HorovodVersionMismatchError("torch", "2.13.0", "2.4.0")
    )


def test_elastic_names_are_ringjaxs() -> None:
    from ringjax import elastic
    from ringjax.common import elastic as theirs
    from ringjax.runner.elastic import worker

    assert (theirs.State, theirs.run_fn) == (elastic.State, elastic.run_fn)
    assert worker.WorkerNotificationManager is elastic.WorkerNotificationManager


@pytest.mark.parametrize(
    ("items", "parts", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 3, [[1, 2, 3], [4, 5], [6, 7]]),
        ([1, 2], 2, [[1], [2]]),
        ([1], 2, [[1], []]),
        ([], 1, [[]]),
    ],
)
def test_split_list(items: list[int], parts: int, expected: list[list[int]]) -> None:
    assert util.split_list(items, parts) == expected


def test_rank_and_size_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringjax.runner.common.util.env import get_env_rank_and_size

    assert get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    assert get_env_rank_and_size() == (2, 3)


def test_powers_of_two() -> None:
    found = [n for n in range(-2, 20) if util.num_rank_is_power_2(n)]
    assert found == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.4.0", "2.4.0", True),
        ("2.13.0+cpu", "2.4.0", True),
        ("2.3.9", "2.4.0", False),
        ("10.0.0rc1", "9.9.9", True),
    ],
)
def test_versions(version: str, target: str, expected: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is expected


@pytest.mark.parametrize("text", ["2", "2.4", "2.4.0.1", "v2.4.0", ""])
def test_bad_versions(text: str) -> None:
    with pytest.raises(ValueError, match="is not a version like"):
        util.is_version_greater_equal_than(text, "1.0.0")


def test_env_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGJAX_OLD", "old")
    monkeypatch.delenv("RINGJAX_NEW", raising=False)

    def seen() -> tuple[str | None, str | None]:
        return os.environ.get("RINGJAX_OLD"), os.environ.get("RINGJAX_NEW")

    with pytest.raises(KeyError), util.env(RINGJAX_OLD=None, RINGJAX_NEW="1"):
        assert seen() == (None, "1")
        raise KeyError
    assert seen() == ("old", None)


def test_built_functions() -> None:
    assert not util.mpi_built(verbose=True) and util.gloo_built()
    assert ringjax.gloo_enabled() and not ringjax.mpi_enabled()
    assert util.cuda_built() is ringjax.cuda_built()
    assert util.check_extension("ringjax.torch", "HOROVOD_WITH_PYTORCH", "x") is None
    assert not util.extension_available("mxnet")
    assert not util.gpu_available("torch") or ringjax.build_info()["devices"]


def test_mxnet_where_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs = "MXNet 1.9.1, which needs Python 3.11 and numpy 1.23.*without JAX"
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "mxnet", None)
        with pytest.raises(ImportError, match=f"(?s){needs}.*ModuleNotFoundError"):
            importlib.import_module("ringjax.mxnet")
    # With numpy 2 MXNet fails so.
    Path(tmp_path, "mxnet.py").write_text("import numpy; numpy.PZERO")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=f"(?s){needs}.*AttributeError.*PZERO"):
        importlib.import_module("ringjax.mxnet")


def test_horovod_basics() -> None:
    from ringjax.common.basics import HorovodBasics

    basics = HorovodBasics(__file__, "mpi_lib_v2")
    assert (basics.Average, basics.Sum, basics.Product) == (0, 1, 5)
    assert not basics.is_initialized()
    basics.init()
    try:
        assert ringjax.is_initialized()
        assert (basics.rank(), basics.size(), basics.local_size()) == (0, 1, 1)
        assert basics.is_homogeneous()
        basics.stop_timeline()
    finally:
        basics.shutdown()
    assert not ringjax.is_initialized()


def test_run_accepts_horovods_arguments() -> None:
    def task(base: int, *, step: int) -> int:
        return int(os.environ["HOROVOD_RANK"]) * step + base

    found = run(
        task, (5,), {"step": 2}, 2, use_gloo=True, disable_cache=True, verbose=0
    )
    assert found == [5, 7]
    options = {"hosts": "localhost:2", "network_interfaces": ["lo"], "use_mpi": False}
    assert ringjax.run(lambda: 1, **options) == [1, 1]
    with pytest.raises(TypeError, match="use_fire"):
        ringjax.run(lambda: 1, use_fire=True)


def test_run_of_an_elastic_job() -> None:
    with pytest.raises(ValueError, match="max_np, reset_limit: only for elastic jobs"):
        run(lambda: 1, np=2, max_num_proc=3, reset_limit=3)
    assert run(lambda: 1, np=2, min_num_proc=1, max_np=2, reset_limit=3) == [1, 1]
