"""Tests that the elastic section of `make gpu-check` runs to its end, on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.launch import ROOT

import ringjax

# Behind everything else: the ringjax under test must not come from the checkout.
sys.path.append(str(ROOT))
from benchmarks.gpu import elastic
from benchmarks.gpu.report import Report


@pytest.mark.timeout(120)
def test_the_story_of_an_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(ringjax.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(ROOT)]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    report = Report(None)
    elastic.check(report, elastic.tell(tmp_path / "elastic", 90))
    assert report.failures == []


def test_what_is_wrong_is_said() -> None:
    end = {"step": 9, "expected": 27.0, "programs": 1, "platform": "gpu", "nccl": True}
    found = {"recovery": 0.5, "join": 0.5, "ends": [end, end | {"expected": 26.0}]}
    report = Report(None)
    elastic.check(report, found)
    assert len(report.failures) == 1
    found["ends"] = [end, end | {"programs": 2, "nccl": False}]
    elastic.check(report, found)
    assert len(report.failures) == 3
