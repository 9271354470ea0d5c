"""Groups whose two processes are on two hosts, so collectives of JAX use the network.

The hosts are network namespaces (tests/support/namespaces.py), which need root.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import local_devices
from support.doctor import needs_root
from support.group_jobs import (
    STEPS,
    finish_and_check,
    lines,
    wait_for_steps,
    wait_until_joined,
)
from support.launch import Job, StartJob
from support.namespaces import LAUNCHER, Namespaces, address

pytestmark = [needs_root("ip"), pytest.mark.timeout(150)]


@pytest.fixture
def network() -> Iterator[Namespaces]:
    with Namespaces(5, None, f"g{os.getpid() % 10_000}") as namespaces:
        _run(f"ip addr add {LAUNCHER}/24 dev {namespaces._bridge}")
        yield namespaces


@pytest.fixture
def start(
    start_job: StartJob, network: Namespaces, tmp_path: Path
) -> Callable[..., Job]:
    agent = network.agent_options(tmp_path)

    def begin(np: int, hosts: int, *options: str, **env: str) -> Job:
        slots = ",".join(f"{address(host)}:1" for host in range(hosts))
        options = ("-H", slots, *agent, *options)
        env = {**local_devices.environment(2)(), **env}
        return start_job(np, STEPS, env, ["--group-size", "2", *options])

    return begin


def test_a_lost_process_ends_its_group_on_another_host(
    start: Callable[..., Job],
) -> None:
    job = start(4, 4, "--min-np", "2")
    wait_for_steps(job, {0, 1, 2, 3}, 20)
    assert {value for _, value in lines(job, 0, "step")} == {"1.5"}
    # First the first worker of a group, then the second worker of another group.
    for victim, rank, newest in ((0, 0, 4), (3, 1, 6)):
        os.kill(job.worker_pid(victim), signal.SIGKILL)
        wait_until_joined(job, newest)
        wait_until_joined(job, newest + 1)
        wait_for_steps(job, {newest, newest + 1}, 20)
        where = rf"worker {victim ^ 1}, on {address(victim ^ 1)}, pid \d+"
        lost = rf"rank {rank ^ 1} \({where}\) ended with its group"
        assert re.search(lost, job.launcher_output()), job.launcher_output()
    finish_and_check(job, {4, 5, 6, 7})


def test_a_lost_host_ends_its_group_and_a_spare_host_replaces_it(
    start: Callable[..., Job], network: Namespaces
) -> None:
    """Sets the network link of the host down: its ranks and agent are unreachable."""
    limits = ("--min-np", "2", "--max-np", "4")
    job = start(4, 5, *limits, RINGJAX_FAILURE_TIMEOUT="3")
    wait_for_steps(job, {0, 1, 2, 3}, 10)
    _run(f"ip -n {network.names[1]} link set eth0 down")
    wait_until_joined(job, 4)
    wait_until_joined(job, 5)
    wait_for_steps(job, {4, 5}, 20)
    for pid in _run(f"ip netns pids {network.names[1]}").split():
        with contextlib.suppress(ProcessLookupError):  # some have already ended
            os.kill(int(pid), signal.SIGKILL)
    finish_and_check(job, {2, 3, 4, 5})
    output = job.launcher_output()
    assert f"worker 5 on {address(4)} joined" in output, output


def _run(command: str) -> str:
    done = subprocess.run(
        command.split(), capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout
