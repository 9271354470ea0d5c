"""Tests of agents that start the agents of other hosts.

The hosts are this machine. A stand-in for ssh knows on which host it runs.
"""

from __future__ import annotations

import base64
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import leaks
from support.launch import environment
from support.waiting import LONG, until

from ringjax.config import Config
from ringjax.run.console import Console
from ringjax.run.hosts.agent_handle import AgentHandle
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Channel, Message, dispatch, open_process
from ringjax.run.hosts.job_spec import JobSpec, agent_command, client_command
from ringjax.run.hosts.pipe_writer import Writer
from ringjax.run.hosts.relayed_channel import RelayedChannel

MIB = 1 << 20
# Here n1 is the relay of n2 and n3, and n4 is the relay of n5.
PROGRAM = """
import runpy
from ringjax.run.hosts import relays
relays.FEWEST_HOSTS, relays.FAN = 5, 2
runpy.run_module("ringjax.run", run_name="__main__")
"""
# $HERE is the host of the client. $CLOSED contains "HERE-HOST" for a closed way.
SSH = """#!/bin/sh
while :; do case "$1" in -*) shift;; *) break;; esac; done
echo "$HERE-$1" >> "$SSH_LOG"
case "$CLOSED" in *"$HERE-$1"*) echo no route >&2; exit 255;; esac
HERE=$1; export HERE; shift
cd / && exec sh -c "$*"
"""
WAYS = ["n1-n2", "n1-n3", "n4-n5", "top-n1", "top-n4"]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell script as five ranks on five hosts. No process may stay."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    job = uuid.uuid4().hex[:12]
    own = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SSH_LOG": f"{tmp_path}/log",
        "HERE": "top",
        "FOLDER": str(tmp_path),
    }

    def run(script: str, *words: str, **env: str) -> subprocess.Popen[str]:
        hosts = ["-H", "n1:1,n2:1,n3:1,n4:1,n5:1", *words]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, *hosts, "sh", "-c", script],
            env=environment(job, {**own, **env}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield run
    left = leaks.settle(lambda: list(leaks.processes(job).values()), 10)
    for pid in leaks.processes(job):
        os.kill(pid, signal.SIGKILL)
    assert not left, "\n".join(left)


def _ways(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "log").read_text().split())


def test_output_and_exit_codes_pass_through_relays(
    start: Start, tmp_path: Path
) -> None:
    script = "echo $RINGJAX_HOSTNAME; touch $FOLDER/ready$RINGJAX_RANK; "
    script += "[ $RINGJAX_RANK = 4 ] || exit 0; cd $FOLDER; "
    job = start(script + "until [ -e go ]; do sleep 0.05; done; exit 3")
    _wait_until_ready(tmp_path)
    (tmp_path / "go").touch()
    out, err = job.communicate(timeout=LONG)
    assert job.returncode == 3, err
    assert sorted(out.split()) == [f"[{n}]<stdout>:n{n + 1}" for n in range(5)]
    assert err == "ringrun: rank 4 (n5) failed with exit code 3\n"
    assert _ways(tmp_path) == WAYS


def test_an_elastic_job_has_no_relays(start: Start, tmp_path: Path) -> None:
    job = start(":", "--min-np", "1")
    job.communicate(timeout=LONG)
    assert {way.partition("-")[0] for way in _ways(tmp_path)} == {"top"}


def test_large_output_of_a_host_behind_a_relay(start: Start) -> None:
    job = start("[ $RINGJAX_RANK != 2 ] || yes 0123456789 | head -n 800000")
    out, err = job.communicate(timeout=LONG)
    assert (job.returncode, err) == (0, "")
    assert out == "[2]<stdout>:0123456789\n" * 800_000


def test_a_host_that_only_ringrun_can_reach(start: Start, tmp_path: Path) -> None:
    job = start("echo $RINGJAX_HOSTNAME", CLOSED="n1-n2 n1-n3")
    out, err = job.communicate(timeout=LONG)
    assert job.returncode == 0, err
    assert sorted(out.split()) == [f"[{n}]<stdout>:n{n + 1}" for n in range(5)]
    assert err.count("ssh on n1 ended (255), so ringrun connects to this host") == 1
    assert _ways(tmp_path) == sorted([*WAYS, "top-n2", "top-n3"])


def test_a_host_that_nobody_can_reach(start: Start) -> None:
    job = start("exec sleep 1000", CLOSED="n4-n5 top-n5")
    _, err = job.communicate(timeout=LONG)
    assert job.returncode == 255
    assert err.endswith("rank 4 (n5): lost its host, ssh ended (255)\n")


READY = "touch $FOLDER/ready$RINGJAX_RANK; sleep 1000 & (setsid sleep 1000 &) ; "


def _wait_until_ready(folder: Path) -> None:
    until(lambda: len(list(folder.glob("ready*"))) == 5)


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (0, "rank 0 (n1): lost its host, ssh ended (137)"),  # n1 is a relay
        (4, "rank 4 (n5): lost its host, ssh on n4 ended (137)"),
    ],
)
def test_kill_9_of_an_agent_leaves_nothing(
    start: Start, tmp_path: Path, rank: int, reason: str
) -> None:
    dies = "until [ -e $FOLDER/go ]; do sleep 0.05; done; kill -9 $PPID"
    job = start(READY + f"[ $RINGJAX_RANK = {rank} ] && {{ {dies}; }}; wait")
    _wait_until_ready(tmp_path)
    (tmp_path / "go").touch()
    _, err = job.communicate(timeout=LONG)
    assert job.returncode == 255
    assert err.endswith(f"{reason}\n")


def test_signals_reach_hosts_behind_relays(start: Start, tmp_path: Path) -> None:
    trap = "trap 'echo usr' USR1; trap 'echo int; exit 1' INT; "
    job = start(trap + READY + "while :; do sleep 0.05; done")
    _wait_until_ready(tmp_path)
    job.send_signal(signal.SIGUSR1)
    assert job.stdout is not None
    heard = [job.stdout.readline() for _ in range(5)]
    assert sorted(heard) == [f"[{n}]<stdout>:usr\n" for n in range(5)]
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=LONG)
    assert job.returncode == 130
    assert sorted(out.split()) == [f"[{n}]<stdout>:int" for n in range(5)]


def test_kill_9_of_ringrun_ends_hosts_behind_relays(
    start: Start, tmp_path: Path
) -> None:
    job = start(READY + "trap '' TERM; wait; wait")
    _wait_until_ready(tmp_path)
    job.kill()
    job.communicate(timeout=LONG)  # the end of the output: no process has it open


# -- one relay without a job -----------------------------------------------------------


class Sent(Writer):
    """A carrier's transport, which records the orders."""

    def __init__(self) -> None:
        super().__init__()
        self.text = b""

    def write(self) -> None:
        self.text += b"".join(self.queue)
        self.queue.clear()

    def flush(self, limit: float) -> None: ...

    def close(self) -> None: ...

    def size(self) -> int:
        orders = map(base64.b64decode, self.text.split(b'"data":"')[1:])
        return sum(map(len, orders))


def test_ringrun_sends_no_more_than_the_window() -> None:
    sent = Sent()
    channel = RelayedChannel(Channel(sent, print), -1, lambda message: None)
    channel.send({"text": "x" * 3 * MIB})
    assert not sent.text and channel.pending > 3 * MIB
    channel.receive(b"Welcome\n")
    assert not sent.text
    channel.receive(b'{"is":"here"}\n{"is":"here"}\n')
    assert sent.size() == MIB
    channel.grant(1000)
    assert sent.size() == MIB + 1000


def test_large_messages_in_both_directions() -> None:
    selector, got = selectors.DefaultSelector(), list[Message]()

    def handle(message: Message) -> None:
        if message["is"] == "output" and message["stream"] == "stdout":
            relayed.receive(base64.b64decode(message["data"]))
        elif message["is"] == "written":
            relayed.grant(message["count"])

    relay, carrier = open_process(agent_command(), [], selector, handle, lambda: None)
    relayed = RelayedChannel(carrier, -1, got.append)
    echo = ["sh", "-c", """echo '{"is":"here"}'; exec cat"""]
    order = {"id": -1, "argv": echo, "env": {}, "relayed": True}
    carrier.send({"do": "spawn", "cwd": "/", "env": None, "children": [order]})
    big = {"text": "x" * 5 * MIB}
    relayed.send(big)
    deadline = time.monotonic() + LONG
    while big not in got and time.monotonic() < deadline:
        dispatch(selector, selector.select(1.0))
    assert big in got
    carrier.close()
    selector.close()
    relay.wait(LONG)


class Observer:
    """Records the lost hosts."""

    def __init__(self) -> None:
        self.lost: list[tuple[list[int], str]] = []

    def host_lost(self, numbers: Sequence[int], text: str) -> None:
        self.lost.append((list(numbers), text))


@pytest.fixture
def two() -> tuple[AgentPool, Observer, AgentHandle, AgentHandle, Sent]:
    """Returns a pool with the relay n1 of n2, and the orders to n1."""
    observer: Any = Observer()
    sent = Sent()
    pool = AgentPool(JobSpec(command=(), env={}, config=Config()), Console(0), observer)
    relay = AgentHandle("n1", -1, "ssh", channel=Channel(sent, print), numbers={0})
    behind = AgentHandle("n2", -2, "ssh on n1", relay=relay, started_at=float("inf"))
    behind.numbers, behind.channel = {1}, Channel(Sent(), print)
    pool._remote = {"n1": relay, "n2": behind}
    pool._clients = {-1: relay, -2: behind}
    return pool, observer, relay, behind, sent


def test_ssh_on_a_relay_gives_up_before_the_start_timeout() -> None:
    spec = JobSpec(command=(), env={}, config=Config(start_timeout=80.0))
    assert "-oConnectTimeout=80" in client_command("n2", spec)[0]
    assert "-oConnectTimeout=20" in client_command("n2", spec, relayed=True)[0]


def test_the_loss_of_a_relay_is_the_loss_of_its_hosts(two: Any) -> None:
    pool, observer, relay, _, _ = two
    pool.lose_agent(relay, "lost its host, ssh ended (255)")
    assert observer.lost == [
        ([0], "lost its host, ssh ended (255)"),
        ([1], "lost its host: n2 was reached through n1, which is lost"),
    ]


def test_a_silent_host_behind_a_relay(two: Any) -> None:
    pool, observer, relay, _, sent = two
    pool._check_silence(time.monotonic())
    pool.handle_message(relay, {"is": "started", "id": -2, "pid": 1})
    pool._check_silence(time.monotonic() + 1000)
    [(numbers, text)] = observer.lost
    assert numbers == [1] and "no answer over ssh on n1 in 120 s" in text
    assert b'"signal":9,"ids":[-2]' in sent.text
