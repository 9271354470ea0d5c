"""Two ranks that each train a model on several GPUs, against training on one device.

With four GPUs or more, the ranks have different GPUs. With two or three GPUs both ranks
have the same GPUs.
"""

from __future__ import annotations

import json
import sys

import pytest
from support import gpu_ranks
from support.launch import StartJob

from benchmarks.gpu import driver

MAX_ERROR = 1e-4  # relative to the largest parameter, in float32


@pytest.mark.timeout(120)
def test_parameters_are_those_of_one_device(
    start_job: StartJob, record_property
) -> None:
    count = 0 if gpu_ranks.ON_CPU else driver.count_devices()[0]
    if count == 1:
        pytest.skip("there is one GPU")
    program = str(gpu_ranks.PROGRAMS / "several_gpus.py")
    job = start_job(
        2,
        [sys.executable, "-P", program, str(count)],
        gpu_ranks.environment(),
        ["--devices-per-rank", "all"],
    )
    assert job.wait(100) == 0, job.logs()
    first, second = (
        json.loads(next(x for x in job.output(r).splitlines() if x.startswith("{")))
        for r in range(2)
    )
    record_property("devices of a rank", first["devices"])
    for placement in ("sharded", "replicated"):
        ours, theirs = first[placement], second[placement]
        record_property(f"{placement}, largest error", f"{ours['error']:.1e}")
        assert max(ours["error"], theirs["error"]) <= MAX_ERROR
        assert ours["digest"] == theirs["digest"], "the ranks hold different bits"
        assert ours["same"] and theirs["same"], "devices hold different bits"
