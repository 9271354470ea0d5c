"""`ringjax.pieces.step` gives the same bits on any number of ranks."""

from __future__ import annotations

import pytest
from support.launch import StartJob

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, sys
import ringjax
import ringjax.pieces
from support import piece_trainings

if "RANDOM" in os.environ:
    sys.modules["ringjax.pieces.step"].Shares = piece_trainings.RandomShares
ringjax.init()
piece_trainings.print_digests()
"""
# The number of XLA's threads is part of the numerics on CPUs.
ENV = {"NPROC": "1"}


def digests(start_job: StartJob, ranks: int, **env: str) -> dict[str, str]:
    """Runs all trainings; returns the digests, which must be equal on all ranks."""
    job = start_job(ranks, PROGRAM, ENV | env)
    assert job.wait(100) == 0, job.logs()
    found = [
        dict(line.split() for line in job.output(rank).splitlines())
        for rank in range(ranks)
    ]
    assert all(one == found[0] for one in found), found
    assert len(found[0]) == 4, job.logs()
    return found[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """The digests of one rank, computed by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        (2, {}),
        (3, {"RANDOM": "1"}),
        (5, {"RINGJAX_SHM": "0"}),
        (7, {}),
    ],
)
def test_one_digest_on_any_number_of_ranks(
    start_job: StartJob, alone: dict[str, str], ranks: int, env: dict[str, str]
) -> None:
    if not alone:
        alone |= digests(start_job, 1)
    assert digests(start_job, ranks, **env) == alone
