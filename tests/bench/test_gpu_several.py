"""Tests of `make gpu-check` for several GPUs per process, without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch import ROOT

# Behind everything else: the ringjax under test must not come from the checkout.
sys.path.append(str(ROOT))
from benchmarks.gpu import several, sharing
from benchmarks.gpu.report import Report


class Item:
    """A stand-in for a collected test, with the attributes that the hook reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: list[str] = []

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


def test_schedules_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "tests" / "gpu"
    spec = importlib.util.spec_from_file_location("of_gpu", folder / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    monkeypatch.setattr(conftest.driver, "count_devices", lambda: (0, "no driver"))
    items = [Item(path) for path in folder.glob("*_*.py")]
    items += [Item(folder / "schedule.py"), Item(ROOT / "tests" / "unit" / "test_x.py")]
    conftest.pytest_collection_modifyitems(items)
    skipped = {item.path for item in items if "skip" in item.marks}
    assert skipped == set(folder.glob("test_*.py")) != set()


def test_which_devices_a_rank_with_several_has() -> None:
    assert [several.visible(8, rank) for rank in (0, 1)] == ["0,1,2,3", "4,5,6,7"]
    assert [several.visible(3, rank) for rank in (0, 1)] == ["0,1"] * 2
    env: dict[str, str] = {}
    sharing.prepare(1, "2,3", env)
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_what_ranks_with_several_devices_say() -> None:
    right = {"worst": 1e-7, "digest": "aa", "same": True}
    cases = dict.fromkeys(several.CASES, right)
    report = Report(None)
    several.tabulate(report, [cases | {"devices": 2}] * 2, 1.0)
    assert report.failures == []
    for wrong in ({"worst": 1e-2}, {"digest": "bb"}, {"same": False}):
        report = Report(None)
        name = next(iter(several.CASES))
        other = cases | {"devices": 2, name: right | wrong}
        several.tabulate(report, [cases | {"devices": 2}, other], 1.0)
        (text,) = report.failures
        assert name in text


def test_one_gpu_cannot_show_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(several.driver, "count_devices", lambda: (1, ""))
    monkeypatch.setattr(sys, "argv", ["several", "--work", str(tmp_path)])
    several.main()
    assert "not run: there is one GPU" in capsys.readouterr().out
