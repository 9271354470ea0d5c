"""A rank that shares a GPU with others is killed, and the others continue without it.

The test starts the ranks itself, because ringrun would end a job that has lost a rank.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import gpu_ranks
from support.launch import environment

LIMIT = 60.0  # seconds for each part of the test
NOTICE_LIMIT = 20.0  # seconds until the survivors must have noticed the loss
pytestmark = pytest.mark.timeout(3 * LIMIT)


class Rank:
    """A process of programs/lost_rank.py, with its output."""

    def __init__(self, rank: int, size: int, job: str, folder: Path) -> None:
        own = {
            "RINGJAX_RANK": str(rank),
            "RINGJAX_SIZE": str(size),
            "RINGJAX_JOB": job,
            "XDG_RUNTIME_DIR": str(folder),
        }
        self._log = folder / f"rank.{rank}"
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(gpu_ranks.PROGRAMS / "lost_rank.py")],
                env=environment(job, gpu_ranks.environment() | own),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, word: str, times: int = 1) -> str:
        """Waits for lines that begin with a word; returns the rest of the last one."""
        deadline = time.monotonic() + LIMIT
        while True:
            text = self._log.read_text(errors="replace")
            found = re.findall(rf"^{word}(.*)\n", text, re.MULTILINE)
            if len(found) >= times:
                return found[-1].strip()
            assert time.monotonic() < deadline, f"no {word!r} in:\n{text[-3000:]}"
            time.sleep(0.02)


@pytest.fixture(params=[3, 2], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Rank]]:
    """The ranks of a job, which end with the test."""
    job, size = secrets.token_hex(8), request.param
    started = [Rank(rank, size, job, tmp_path) for rank in range(size)]
    yield started
    for rank in started:
        rank.process.kill()
        rank.process.wait()


def test_survivors_name_the_killed_rank_and_train_on(ranks, record_property) -> None:
    *survivors, victim = ranks
    for rank in ranks:  # the second training lasts until a rank is lost
        rank.wait_for("training", times=2)
    killed = time.time()
    victim.process.kill()
    notices = [rank.wait_for("caught").partition(" ") for rank in survivors]
    noticed = max(float(when) for when, _, _ in notices) - killed
    record_property(f"{len(ranks)} ranks, to the error", f"{noticed:.2f} s")
    assert all(f"rank {len(survivors)}" in text for _, _, text in notices), notices
    assert noticed <= NOTICE_LIMIT
    ends = [rank.wait_for("re-formed").split() for rank in survivors]
    trained_on = max(float(when) for when, _ in ends) - killed
    record_property(f"{len(ranks)} ranks, to the new world", f"{trained_on:.2f} s")
    assert [rank.process.wait(20) for rank in survivors] == [0] * len(survivors)
