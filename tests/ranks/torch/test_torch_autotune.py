"""Autotuning: a DistributedOptimizer tries bucket sizes in its first steps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.launch import StartJob

SCRIPT = """
import torch
import ringjax.torch as hvd

hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
x = torch.full((4, 8), float(hvd.rank()))
for _ in range(14):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
gradients = optimizer._reducer
tuning = gradients._tuning
print("SUM", sum(float(p.sum()) for p in model.parameters()))
print("TUNED", tuning and (tuning.settled, str(tuning.setting)))
"""


def run(start_job: StartJob, folder: Path, ranks: int, *options: str) -> list[str]:
    """Returns a line of each rank about its tuning; all parameters must be equal."""
    job = start_job(ranks, SCRIPT, {"RINGJAX_CACHE_DIR": str(folder)}, options)
    assert job.wait(90) == 0, job.logs()
    found = []
    for what in ("SUM", "TUNED"):
        for rank in range(ranks):
            found.append(job.output(rank).partition(what)[2].splitlines()[0].strip())
    assert len(set(found[:ranks])) == 1, job.logs()
    return found[ranks:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_choose_the_same_bucket_size(
    start_job: StartJob, tmp_path: Path, ranks: int
) -> None:
    log = tmp_path / "log.csv"
    options = ["--autotune", "--autotune-log-file", str(log)]
    options += ["--autotune-warmup-samples", "1", "--autotune-steps-per-sample", "3"]
    found = run(start_job, tmp_path, ranks, *options)
    assert len(set(found)) == 1
    assert found[0].startswith("(True, ")
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert len(rows) == 3
    assert [row["chosen"] for row in rows].count("True") == 1


def test_without_the_option_nothing_is_tried(
    start_job: StartJob, tmp_path: Path
) -> None:
    assert run(start_job, tmp_path, 2) == ["None", "None"]
    assert not list(tmp_path.glob("tuning-*"))
