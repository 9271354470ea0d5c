"""Tests that foreign connections to a training job's listeners have no effect.

benchmarks/elastic/strangers.py measures that throughput does not suffer either.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import leaks, strangers
from support.launch import Job, StartJob

TRAIN = """
import os, sys, time
import numpy as np
import ringjax
from support import numpy_only

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()
x, steps = np.arange(1001, dtype=np.float32) + rank, 0
expected = np.arange(1001, dtype=np.float32) * size + sum(range(size))
print("training", flush=True)
while True:
    for _ in range(20):
        found = numpy_only.allreduce(x)
        assert (found == expected).all(), f"step {steps} has a wrong result"
        steps += 1
    # No wait for anything: without a pause no stranger would meet ranks that are idle.
    time.sleep(0.02)
    stop = np.float32(rank == 0 and os.path.exists(sys.argv[1]))
    if numpy_only.allreduce(stop, "Max") > 0:
        break
print(f"done after {steps} steps", flush=True)
"""


@pytest.fixture
def training(start_job: StartJob, tmp_path: Path) -> Job:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(TRAIN)
    # Without shared memory the job also has TCP listeners, as between hosts.
    words = [sys.executable, str(script), str(stop)]
    job = start_job(2, words, env={"RINGJAX_SHM": "0"})
    for rank in range(2):
        job.wait_for(rank, "training")
    return job


def _name(job: Job) -> str:
    variables = Path(f"/proc/{job.rank_pid(0)}/environ").read_bytes().split(b"\0")
    (found,) = [v for v in variables if v.startswith(b"RINGJAX_JOB=")]
    return found.partition(b"=")[2].decode()


def _end(job: Job, stop: Path) -> None:
    stop.touch()
    assert job.wait(40) == 0, job.logs()
    for rank in range(job.np):
        assert "done after" in job.output(rank), job.logs()


def _refusals(job: Job) -> list[str]:
    texts = [job.launcher_output(), *(job.output(rank) for rank in range(job.np))]
    return [text for t in texts for text in t.splitlines() if "refused a conn" in text]


def _grown(before: dict[int, int], job: str) -> list[str]:
    """Lists the processes that have more than one descriptor more than before."""
    now = strangers.descriptors(job)
    return [f"{pid}: {n} now" for pid, n in now.items() if n > before.get(pid, n) + 1]


@pytest.mark.timeout(120)
def test_foreign_connections_do_not_affect_a_job(training: Job, tmp_path: Path) -> None:
    listeners = strangers.listeners(training.id)
    assert len(listeners) >= 3, listeners  # the rendezvous, and one or two of each rank
    fds, memory = strangers.descriptors(training.id), strangers.memory(training.id)
    with contextlib.ExitStack() as stack:
        kept = []

        def visit(listener: strangers.Listener, kind: str) -> None:
            for _ in range(3):
                sock = strangers.BEHAVIORS[kind](listener, _name(training))
                if sock is not None:
                    kept.append(stack.enter_context(sock))

        # All connections are made concurrently, because most wait to be closed.
        visits = list(itertools.product(listeners, strangers.BEHAVIORS))
        with ThreadPoolExecutor(len(visits)) as pool:
            list(pool.map(visit, *zip(*visits, strict=True)))
        # No foreign connection stays open for longer than a handshake may take.
        for sock in kept:
            sock.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert not leaks.settle(lambda: _grown(fds, training.id), 20)
    grown = {p: n - memory.get(p, n) for p, n in strangers.memory(training.id).items()}
    assert max(grown.values()) < 32 << 20, grown
    _end(training, tmp_path / "stop")
    # Each listener warns once per minute instead of once per connection.
    assert 1 <= len(_refusals(training)) <= 2 * len(listeners), training.logs()


@pytest.mark.timeout(120)
def test_a_job_survives_a_storm_of_connections(training: Job, tmp_path: Path) -> None:
    listeners = strangers.listeners(training.id)
    fds = strangers.descriptors(training.id)
    made = sum(
        strangers.connect_and_close(listener, 10_000 // len(listeners))
        for listener in listeners
    )
    assert made > 5_000
    assert not leaks.settle(lambda: _grown(fds, training.id), 20)
    _end(training, tmp_path / "stop")
    assert len(_refusals(training)) <= 2 * len(listeners), training.logs()
