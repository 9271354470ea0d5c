"""Tests of the processes of a host: killed with their parent, and all descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest
from support import leaks
from support.launch import environment
from support.waiting import until


def start_python(code: str, job: str) -> subprocess.Popen[str]:
    """Starts a Python process that imports `processes` and runs `code`."""
    head = "import os, sys, time\nfrom ringjax.run.hosts import processes\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        env=environment(job, {}),
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_children_are_killed_with_their_parent() -> None:
    job = uuid.uuid4().hex
    code = """
child = processes.start(["sleep", "1000"], os.environ)
print(child.pid, flush=True)
time.sleep(1000)
"""
    with start_python(code, job) as process:
        child = int(line(process))
        assert child in leaks.processes(job)
        process.kill()
    until(lambda: not leaks.processes(job))


def test_descendants_in_other_sessions_are_killed() -> None:
    job = uuid.uuid4().hex
    code = """
processes.become_subreaper()
words = "setsid sh -c 'echo up; sleep 1000 & (setsid sleep 1000 &); wait' & wait"
child = processes.start(["sh", "-c", words], os.environ)
os.read(child.pipes["stdout"], 3)
ended = processes.kill_descendants(limit=40.0)
assert (child.pid, 137) in ended, ended
print(processes.has_no_children(), flush=True)
"""
    with start_python(code, job) as process:
        assert line(process) == "True"
    assert process.returncode == 0
    assert leaks.processes(job) == {}


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGTERM])
def test_ranks_do_not_inherit_ignored_signals(ignored: signal.Signals) -> None:
    code = f"""
import signal
signal.signal({int(ignored)}, signal.SIG_IGN)
child = processes.start(["sh", "-c", "kill -{int(ignored)} $$; echo alive"], os.environ)
child.process.wait()
print(child.process.returncode, flush=True)
"""
    with start_python(code, uuid.uuid4().hex) as process:
        assert line(process) == str(-ignored)


def test_a_failed_start_leaves_no_descriptor() -> None:
    from ringjax.run.hosts import processes

    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        processes.start(["no-such-command"], {}, payload=b"task")
    assert os.listdir("/proc/self/fd") == before
