"""The Python blocks of docs/train/mxnet.md run, each as a job of two ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.launch import ROOT

PAGE = (ROOT / "docs/train/mxnet.md").read_text()
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)
AFTER = """
import numpy as np

params = net.collect_params() if "net" in globals() else module.get_params()[0]
values = [getattr(p, "data", lambda p=p: p)().asnumpy() for p in params.values()]
first, second = hvd.allgather_object(values)
assert len(values) >= 2 and all(map(np.array_equal, first, second))
"""


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_and_leaves_equal_parameters(number: int, start_job: Any) -> None:
    job = start_job(2, BLOCKS[number] + AFTER)
    assert job.wait(50) == 0, job.logs()
