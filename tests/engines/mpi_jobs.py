"""Ranks that launchers start: of Open MPI, MPICH and Intel MPI, and torchrun."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import mpi
from engines.mpi import Launcher
from support import leaks

pytestmark = pytest.mark.timeout(180)
PROGRAM = """
import os, signal, sys
import numpy as np
import ringjax

ringjax.init()
rank, how = ringjax.rank(), sys.argv[1]
total = int(ringjax.allreduce(np.full(3, rank + 1.0), op=ringjax.Sum)[0])
sys.stdout.write(f"rank {rank}/{ringjax.size()} {ringjax.local_rank()} {total}\\n")
sys.stdout.flush()
if rank == 1 and how == "raise":
    raise ValueError("boom")
if rank == 1 and how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
ringjax.barrier()
"""


@pytest.fixture(params=mpi.LAUNCHERS, ids=lambda launcher: launcher.name)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    found: Launcher = request.param
    return _here(found)


def _here(launcher: Launcher) -> Launcher:
    if missing := launcher.missing():
        pytest.skip(missing)
    return launcher


@pytest.fixture
def program(tmp_path: Path) -> Iterator[list[str]]:
    """Yields the command of the program; checks that no process remains afterwards."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    yield [sys.executable, str(path)]

    def left() -> list[str]:
        lines = Path("/proc").glob("[0-9]*/cmdline")
        return [str(line) for line in lines if str(path).encode() in _bytes(line)]

    assert not leaks.settle(left, 10)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _ranks(text: str) -> list[str]:
    return sorted(re.findall(r"rank (\d+/\d+ \d+ \d+)", text))


def _all(size: int) -> list[str]:
    total = size * (size + 1) // 2
    return sorted(f"{rank}/{size} {rank} {total}" for rank in range(size))


@pytest.mark.parametrize("np", [2, 3, 5])
def test_allreduce(launcher: Launcher, program: list[str], np: int) -> None:
    code, text = launcher.run(np, *program, "end")
    assert code == 0, text
    assert _ranks(text) == _all(np), text


def test_two_jobs_at_once_are_independent(
    launcher: Launcher, program: list[str]
) -> None:
    jobs = [launcher.start(2, *program, "end") for _ in range(2)]
    for job in jobs:
        text, _ = job.communicate(timeout=90)
        assert job.returncode == 0, text
        assert _ranks(text) == _all(2), text


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failing_rank_ends_the_job(
    launcher: Launcher, program: list[str], how: str
) -> None:
    begin = time.monotonic()
    code, text = launcher.run(3, *program, how)
    assert code != 0
    assert time.monotonic() - begin < 60
    assert ("ValueError: boom" in text) == (how == "raise"), text


def test_bare_prterun_is_refused(program: list[str]) -> None:
    code, text = _here(mpi.PRTERUN).run(2, *program, "end")
    assert code != 0
    words = " ".join(text.split())
    assert "nothing tells how many there are: start it by mpirun, or set RING" in words


def test_prterun_with_the_size(program: list[str]) -> None:
    command = 'RINGJAX_RANK=$PMIX_RANK RINGJAX_SIZE=2 exec "$@"'
    words = ["sh", "-c", command, "sh", *program, "end"]
    code, text = _here(mpi.PRTERUN).run(2, *words)
    assert code == 0, text
    assert _ranks(text) == _all(2), text


def test_a_launcher_with_pmi_alone(program: list[str]) -> None:
    gforker = _here(mpi.GFORKER)
    code, text = gforker.run(2, *program, "end")
    assert code != 0
    assert "set MASTER_ADDR to it, localhost if it is the only one" in text
    code, text = gforker.run(2, *program, "end", MASTER_ADDR="localhost")
    assert code == 0, text
    assert _ranks(text) == _all(2), text


@pytest.mark.parametrize("how", ["end", "raise"])
def test_torchrun(program: list[str], how: str) -> None:
    pytest.importorskip("torch.distributed.run", reason="torchrun: no torch here")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", program[1], how]
    torchrun = Launcher("torchrun", Path(sys.executable), "")
    process = torchrun.start_words(*words)
    text, _ = process.communicate(timeout=120)
    assert _ranks(text) == _all(2), text
    assert (process.returncode == 0) == (how == "end"), text
