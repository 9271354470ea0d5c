"""Jobs in a parallel environment of a real Grid Engine; agents by `qrsh -inherit`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
from engines import grid_engine as small
from engines.grid_engine import GridEngine

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(small.missing()), reason=small.missing() or "all is here"),
]
PROGRAM = """
import os
import numpy as np
import ringjax

ringjax.init()
total = int(ringjax.allreduce(np.ones(3), op=ringjax.Sum)[0])
print(ringjax.rank(), ringjax.local_rank(), total, os.environ["PE"], flush=True)
"""
RINGRUN = f"{sys.executable} -P -m ringjax.run"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    cluster = GridEngine(tmp_path_factory.mktemp("grid"))
    try:
        cluster.start()
        (cluster.folder / "train.py").write_text(PROGRAM)
        yield cluster
    finally:
        cluster.stop()


def _ranks(text: str) -> list[str]:
    return sorted(re.findall(r"\]<stdout>:(.*)", text))


def test_slots_come_from_the_parallel_environment(engine: GridEngine) -> None:
    text = engine.run(f"{RINGRUN} {sys.executable} {engine.folder}/train.py", 3)
    assert "ended with 0" in text, text
    assert _ranks(text) == [f"{rank} {rank} 3 ring" for rank in range(3)]


def _by_qrsh(engine: GridEngine, command: str) -> str:
    """Runs a job with a second host, which is another name of this machine."""
    words = f"env AT={{host}} qrsh -inherit -noshell {engine.host}"
    hosts = f"-H localhost:1,other:2 --agent-command '{words}'"
    return engine.run(f"{RINGRUN} {hosts} {command}", 3)


def test_agents_by_qrsh(engine: GridEngine) -> None:
    text = _by_qrsh(engine, f"{sys.executable} {engine.folder}/train.py")
    assert "ended with 0" in text, text
    assert _ranks(text) == ["0 0 3 ring", "1 0 3 ring", "2 1 3 ring"]


def test_a_failing_rank_ends_the_job(engine: GridEngine) -> None:
    text = _by_qrsh(engine, "sh -c '[ $RINGJAX_RANK != 2 ] || exit 5; sleep 60'")
    assert "ended with 5" in text, text
    assert "rank 2 (other)" in text, text
