"""Tests of jobs in a network namespace whose loopback has no IPv4 address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support.launch import ROOT, environment

# Runs a command in a network namespace whose only address is ::1.
NAMESPACE = [
    "unshare",
    "-n",
    "sh",
    "-c",
    """
ip link set lo up && ip -4 addr flush dev lo || exit 99
exec "$@"
""",
    "sh",
]
PROGRAM = """
import numpy as np
from ringjax import eager, runtime
runtime.init()
print(eager.allreduce(np.full(3, runtime.rank(), np.float32)), flush=True)
runtime.shutdown()
"""


def _why_not() -> str:
    if os.geteuid() != 0:
        return "only root may make a network namespace"
    if not (shutil.which("unshare") and shutil.which("ip")):
        return "there is no unshare or no ip"
    done = subprocess.run([*NAMESPACE, "ip", "addr"], capture_output=True, text=True)
    if "127.0.0.1" in done.stdout or "::1" not in done.stdout:
        return f"no namespace with ::1 alone: {done.stderr.strip() or done.stdout}"
    return ""


@pytest.fixture(scope="module")
def _alone() -> None:
    if why := _why_not():
        pytest.skip(why)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("words", [("-np", "2"), ("-np", "2", "--min-np", "1")])
@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_job_on_this_host(words: tuple[str, ...], shm: str) -> None:
    python = [sys.executable, "-P"]
    done = subprocess.run(
        [*NAMESPACE, *python, "-m", "ringjax.run", *words, *python, "-c", PROGRAM],
        env=environment("ringrun", {"RINGJAX_SHM": shm}),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0.5 0.5 0.5]") == 2


@pytest.mark.usefixtures("_alone")
def test_ranks_without_ringrun() -> None:
    ranks = [
        f'RINGJAX_RANK={rank} RINGJAX_SIZE=2 "{sys.executable}" -P -c "$PROGRAM" &'
        for rank in range(2)
    ]
    script = "\n".join([*ranks, "wait"])
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", script],
        env=environment("ranks", {"PROGRAM": PROGRAM}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout.count("[0.5 0.5 0.5]") == 2, done.stderr
