"""Some cells of `python -m chaos.same_bits`: one digest on any ranks, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chaos.cells import References, draw, run_cell, run_sweep
from support.handshakes import needs_tls
from support.launch import StartJob

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def references() -> Iterator[References]:
    with closing(References()) as started:
        yield started


@pytest.mark.parametrize(
    ("ranks", "transport", "model"),
    [(3, "tcp", "nnx"), pytest.param(2, "tls", "loop", marks=needs_tls)],
)
def test_all_kinds_of_shares(
    start_job: StartJob,
    references: References,
    ranks: int,
    transport: str,
    model: str,
) -> None:
    run_sweep(ranks, transport, [model], references, start_job)


@pytest.mark.parametrize("seed", [26, 39])
def test_random_faults(
    start_job: StartJob, references: References, tmp_path: Path, seed: int
) -> None:
    cell = draw(seed, ["memory", "tcp"])
    run_cell(cell, references[cell.model], start_job, tmp_path, seconds=2)
