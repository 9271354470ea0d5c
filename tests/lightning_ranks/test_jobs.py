"""Programs with Lightning as users start them: launchers, both packages, errors."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT

from ringjax.lightning import strategy

pytestmark = pytest.mark.timeout(300)
PROGRAM = """
import sys
{imports}
import torch
from {package} import {names}
import ringjax.lightning
from ringjax.lightning import RingjaxStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        if index == 1 and {fails}:
            raise ZeroDivisionError("of the user")
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(
    strategy={strategy}, accelerator="cpu", devices={devices}, max_epochs=1,
    logger=False, enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(32, 2), batch_size=4))
sys.stdout.write(f"ranks {{trainer.world_size}} steps {{trainer.global_step}}\\n")
"""


def _run(tmp_path: Path, *launcher: str, env=None, **values: object):
    given = {
        "imports": "",
        "package": "lightning",
        "names": "LightningModule, Trainer",
        "fails": False,
        "strategy": '"ringjax"',
        "devices": '"auto"',
        **values,
    }
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(**given))
    return subprocess.run(
        [*launcher, sys.executable, str(program)],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )


def _ringrun(ranks: int) -> tuple[str, ...]:
    return (str(Path(sys.executable).with_name("ringrun")), "-np", str(ranks))


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_both_packages_and_both_ways_to_name_the_strategy(tmp_path, package) -> None:
    pytest.importorskip(package, reason="the package is optional")
    strategy = "RingjaxStrategy()"
    done = _run(tmp_path, *_ringrun(2), package=package, strategy=strategy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2 steps 4") == 2


def test_a_plain_process_is_one_rank(tmp_path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ranks 1 steps 8" in done.stdout
    done = _run(tmp_path, devices=2)
    assert done.returncode == 1
    assert "run `ringrun -np 2 python train.py`" in done.stderr


def test_torchruns_variables_start_ranks(tmp_path) -> None:
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")
    done = _run(tmp_path, sys.executable, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2 steps 4") == 2


def test_an_exception_of_one_rank_ends_the_job_with_its_error(tmp_path) -> None:
    done = _run(tmp_path, *_ringrun(2), fails="trainer.global_rank == 1")
    assert done.returncode != 0
    assert "rank 1 failed: ZeroDivisionError: of the user" in done.stderr


def test_an_elastic_job_is_refused_by_name(tmp_path) -> None:
    done = _run(tmp_path, *_ringrun(2), "--min-np", "1")
    assert done.returncode != 0
    assert "this is an elastic job (ringrun --min-np)" in done.stderr


ELASTIC = """
import os, signal, sys
import lightning, torch
import ringjax.lightning
import ringjax.torch as hvd

fabric = lightning.Fabric(strategy="ringjax", accelerator="cpu")
fabric.launch()
plain = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
model, wrapped = fabric.setup(plain, optimizer)

@hvd.elastic.run
def train(state):
    while state.step < 30:
        x = torch.full((8, 4), 1.0 + state.step % 3 + hvd.rank())
        fabric.backward((model(x) - 1).square().mean())
        wrapped.step()
        wrapped.zero_grad()
        if state.step == 10 and hvd.rank() == 1 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()
    weights = hvd.allgather(plain.weight.detach())
    equal = bool((weights == weights[0]).all())
    sys.stdout.write(f"ranks {fabric.world_size} equal {equal}\\n")

train(hvd.elastic.TorchState(plain, optimizer, step=0))
"""


def test_fabric_goes_on_in_an_elastic_job_without_a_lost_rank(tmp_path) -> None:
    program = tmp_path / "train.py"
    program.write_text(ELASTIC)
    command = [*_ringrun(3), "--min-np", "2", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2 equal True") == 2


def test_the_example_has_one_result_on_any_number_of_ranks() -> None:
    """In float64: rounding of float32 depends on the rows of a rank's batch."""
    program = str(ROOT / "examples" / "lightning_digits.py")
    options = ["--epochs", "2", "--precision", "64-true"]
    results = []
    for launcher in ((), _ringrun(2), _ringrun(3)):
        command = [*launcher, sys.executable, program, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        results.append(re.findall(r"(epoch .*%)  after|(result: .*)", done.stdout))
    assert len(results[0]) == 3 and results[0] == results[1] == results[2]


def test_the_programs_of_the_page_run(tmp_path) -> None:
    page = (ROOT / "docs" / "train" / "lightning.md").read_text()
    for number, block in enumerate(re.findall(r"(?ms)^```python\n(.*?)^```", page)):
        program = tmp_path / f"{number}.py"
        program.write_text(block)
        command = [*_ringrun(2), sys.executable, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr


def test_the_examples_in_docstrings_run() -> None:
    assert doctest.testmod(strategy).attempted > 4
    assert doctest.testmod(strategy).failed == 0
