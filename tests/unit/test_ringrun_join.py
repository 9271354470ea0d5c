"""Tests of ringrun and its coordinator: the reported cause, and ranks that do not join.

The ranks join the job without jax and without the native core.
"""

from __future__ import annotations

from pathlib import Path

from support.launch import StartJob

JOIN = """
import os, select, signal, sys, time
from pathlib import Path
from ringjax.config import Config
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

config = Config.from_env()
rank = config.rank

def enter():
    hello, limit = {"size": config.size}, config.start_timeout
    secret = bytes.fromhex(config.secret)
    credentials = JobCredentials(config.rendezvous, secret, config.job)
    return join(credentials, rank, hello, limit)

"""


def test_the_reason_is_the_first_reported_failure(start_job: StartJob) -> None:
    script = """
client = enter()
pids = client.exchange(os.getpid(), 40.0, "pids")
if rank == 1:
    other = os.pidfd_open(pids[0])
    client.report_failure("ValueError: boom")
    select.select([other], [], [])  # slow to leave
    os._exit(5)
while 1 not in client.departed_ranks():
    time.sleep(0.01)
sys.exit("PeerLost: rank 1 failed: ValueError: boom")
"""
    job = start_job(2, JOIN + script)
    assert job.wait() == 5
    last = job.launcher_output().strip().splitlines()[-1]
    assert last == "ringrun: rank 1 failed: ValueError: boom (exit code 5)"


def test_start_timeout_names_missing_ranks(start_job: StartJob, tmp_path: Path) -> None:
    script = """
if rank in (1, 3):
    time.sleep(1000)
# The other ranks wait here for each other, because interpreters start at different
# speeds.
folder = Path(os.environ["FOLDER"])
(folder / str(rank)).touch()
while len(list(folder.iterdir())) < 2:
    time.sleep(0.005)
enter()
"""
    env = {"FOLDER": str(tmp_path)}
    job = start_job(4, JOIN + script, env, ["--start-timeout", "1"])
    assert job.wait() == 1
    last = job.launcher_output().strip().splitlines()[-1]
    assert last.startswith(
        "ringrun: the job did not start: ranks 1, 3 of 4 did not join"
    )


def test_a_rank_that_exits_before_init(start_job: StartJob) -> None:
    job = start_job(2, JOIN + "if rank == 0: enter()")
    assert job.wait() == 1
    last = job.launcher_output().strip().splitlines()[-1]
    assert "rank 1 ended without an error while others wait" in last


def test_loopback_only_if_all_hosts_are_local(start_job: StartJob) -> None:
    job = start_job(2, JOIN + "print(config.rendezvous)")
    assert job.wait() == 0
    assert job.output(0).startswith("127.0.0.1:")
    assert "," not in job.output(0)
