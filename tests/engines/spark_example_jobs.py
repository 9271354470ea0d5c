"""The example for Spark, started by the command in its docstring."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.launch import ROOT

pytest.importorskip("pyspark", reason="Spark is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.mark.timeout(300)
def test_the_example_learns_the_digits() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "spark_torch.py"), "--epochs", "3"],
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"([\d.]+)% of (\d+) images", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 70 and int(found[2]) > 250
