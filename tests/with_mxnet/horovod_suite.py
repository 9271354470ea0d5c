"""Horovod's own tests of MXNet, with `ringjax.mxnet` in place of `horovod.mxnet`.

`make test-mxnet HOROVOD_SOURCE=folder` runs them; the folder has Horovod's source.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT = 250  # seconds; two ranks need 9
FILES = ("base_test_mxnet.py", "test_mxnet1.py")
# Horovod's test/utils/common.py imports modules that are not about MXNet.
COMMON = """
def skip_or_fail_gpu_test(test, message):
    test.skipTest(message)
"""
PROGRAM = """
import sys, pytest
options = ["-q", "-rA", "-p", "no:cacheprovider", "-c", "/dev/null"]
sys.exit(pytest.main([*options, sys.argv[1]]))
"""
# On one rank they add a process set without ranks, an error in ringjax.
EMPTY_SETS = {f"test_horovod_{op}_process_sets" for op in (
    "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "alltoall",
    "reducescatter", "grouped_reducescatter",
)}  # fmt: skip


def copy_suite(folder: Path) -> Path:
    """Copies the tests into `folder`. Returns the file to run."""
    source = Path(os.environ["HOROVOD_SOURCE"], "test", "parallel")
    (folder / "utils").mkdir()
    (folder / "utils" / "common.py").write_text(COMMON)
    (folder / "parallel").mkdir()
    for name in FILES:
        text = (source / name).read_text()
        text = text.replace(
            "import horovod.mxnet as hvd", "import ringjax.mxnet as hvd"
        )
        (folder / "parallel" / name).write_text(text)
    return folder / "parallel" / FILES[-1]


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_horovods_tests_pass(ranks: int, start_job: Any, tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-c", PROGRAM, str(copy_suite(tmp_path))]
    job = start_job(ranks, words)
    job.wait(LIMIT)
    for rank in range(ranks):
        text = job.output(rank)
        lines = re.findall(r"(?m)^(PASSED|FAILED|ERROR) \S*::(\w+)", text)
        wrong = {name for outcome, name in lines if outcome != "PASSED"}
        assert wrong == (EMPTY_SETS if ranks == 1 else set()), text[-8000:]
        assert len(lines) - len(wrong) == (32 if ranks == 1 else 57), text[-8000:]
