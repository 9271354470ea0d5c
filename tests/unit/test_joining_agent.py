"""Tests of agents that join: `ringrun --listen` and `ringrun --join`.

All processes run on this machine, and each agent has a different host name. Tests kill
the launcher or agents. tests/engines runs agents in pods.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import leaks
from support.fault_proxy import FaultProxy
from support.joining_agents import JoinableJob, Process
from support.ringrun import sh
from support.waiting import LONG, until

from ringjax.control.connecting import connect_to_server
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.run.cli import _JOB
from ringjax.run.hosts.channel import Message


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JoinableJob]:
    found = JoinableJob(tmp_path)
    yield found
    left = found.close()
    assert not left, left


SHOW = sh('echo "$RINGJAX_RANK on $RINGJAX_HOSTNAME, $WHOSE; $RINGJAX_RENDEZVOUS"')


def test_a_job_of_fixed_size(job: JoinableJob) -> None:
    agents = [job.join("pod-10", 1, WHOSE="engine")]
    ringrun = job.listen("-np", "3", *SHOW, WHOSE="ringrun")
    agents.append(job.join("pod-9", 2, WHOSE="engine"))
    assert ringrun.wait() == 0, ringrun.output
    assert [agent.wait() for agent in agents] == [0, 0]
    where = f"localhost:{job.port + 1}"
    assert sorted(ringrun.lines("<stdout>")) == [
        f"[0]<stdout>:0 on pod-9, engine; {where}",
        f"[1]<stdout>:1 on pod-9, engine; {where}",
        f"[2]<stdout>:2 on pod-10, engine; {where}",
    ]


def test_an_allreduce_over_two_hosts(job: JoinableJob) -> None:
    program = job.folder / "sum.py"
    program.write_text(
        "import numpy as np, ringjax; ringjax.init()\n"
        "print(ringjax.allreduce(np.ones(3), op=ringjax.Sum), ringjax.cross_size())\n"
    )
    agents = [job.join("a"), job.join("b")]
    ringrun = job.listen("-np", "2", sys.executable, str(program))
    assert ringrun.wait(40) == 0, ringrun.output
    assert [agent.wait() for agent in agents] == [0, 0]
    assert ringrun.output.count("<stdout>:[2. 2. 2.] 2") == 2


def test_agents_exit_with_the_jobs_code(job: JoinableJob) -> None:
    wait = 'while ! [ -e "$FOLDER/end" ]; do sleep 0.05; done; exit 7'
    ringrun = job.listen("-np", "2", *sh(wait))
    agents = [job.join("a"), job.join("b"), job.join("idle")]
    for agent in agents:
        agent.wait_for("joined the job")
    job.end()
    assert ringrun.wait() == 7, ringrun.output
    assert [agent.wait() for agent in agents] == [7, 7, 7]


def test_missing_slots_fail_the_start(job: JoinableJob) -> None:
    agent = job.join("a", 1, "--elastic-timeout", "5")
    ringrun = job.listen("-np", "2", "--elastic-timeout", "2", *SHOW)
    assert ringrun.wait() == 1
    # No host has joined if Python needs more than 2 s to start.
    come = len(ringrun.lines("host a has come"))
    assert f"did not start: --listen found {come} of 2 slots in 2 s" in ringrun.output
    assert agent.wait() == 1


def test_a_missing_launcher(job: JoinableJob) -> None:
    agent = job.join("a", 1, "--elastic-timeout", "5")
    assert agent.wait() == 1
    where = f"the ringrun at localhost:{job.port}: Connection refused"
    assert re.search(rf"waits up to \d s more: {where}", agent.output), agent.output
    assert agent.lines(f"ringrun --join: {where}, for 5 s"), agent.output


def test_an_unknown_launcher_name(job: JoinableJob) -> None:
    agent = job.start("--join", "nowhere.invalid:29400", "--elastic-timeout", "1")
    assert agent.wait() == 1
    assert agent.lines("the ringrun at nowhere.invalid:29400: "), agent.output


def test_another_secret_is_refused(job: JoinableJob) -> None:
    ringrun = job.listen("--min-np", "1", *job.rank)
    ringrun.wait_for("")
    agent = job.join("a", RINGJAX_SECRET="cd" * 32)
    assert agent.wait() == 1
    assert agent.lines("does not know this job's secret (RINGJAX_SECRET, or")
    ringrun.wait_for("refused a connection from 127.0.0.1: it .* it has another secret")
    ringrun.kill(signal.SIGTERM)
    assert ringrun.wait() == 143


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--join", "a"], "'a': expected host:port"),
        (["--join", "a:1,b:1"], "expected HOST:PORT"),
        (["--join", "a:1", "true"], "the command is given to ringrun --listen"),
        (["--join", "a:1", "--slots", "0"], "0 is less than 1"),
        (["--listen", "65535", "-np", "1", "true"], "expected PORT or ADDRESS:PORT"),
        (["--listen", ":7", "-np", "1", "true"], "expected PORT or ADDRESS:PORT"),
        (["--listen", "29400", "true"], "say how many processes to start: -np"),
        (["--listen", "1", "--host-discovery-script", "x", "true"], "give no script"),
        (["--listen", "1", "-np", "1", "--stdin", "0", "true"], "where rank 0 is"),
    ],
)
def test_bad_options(job: JoinableJob, words: list[str], why: str) -> None:
    done = job.start(*words)
    assert done.wait() == 2
    assert why in done.output


@pytest.mark.parametrize(
    "words", [["--listen", "1", "-np", "1", "x"], ["--join", "a:1"]]
)
def test_a_secret_is_needed(job: JoinableJob, words: list[str]) -> None:
    done = job.start(*words, RINGJAX_SECRET="")
    assert done.wait() == 2
    assert f"{words[0]}: no secret; give all hosts the same one" in done.output


# Messages of an agent.


def _connect_as_agent(
    job: JoinableJob,
) -> tuple[socket.socket, Callable[[Message], Message]]:
    """Connects as an agent. Returns the socket and a function that sends a message."""
    who = HandshakeRequest(_JOB, Purpose.AGENT, 0, -1)
    where = f"127.0.0.1:{job.port}"
    sock, keys, _ = connect_to_server(
        where, job.secret, who, time.monotonic() + LONG, "ringrun"
    )
    sealer, opener = keys.sealer(), keys.opener()

    def exchange(message: Message) -> Message:
        sock.sendall(sealer.seal(message))
        while not (found := opener.feed(sock.recv(1 << 16))):
            pass
        return found[0]

    return sock, exchange


STATE: Message = {"job": "1" * 16, "next": 3, "hosts": [[0, "a"]]}
HELLO: Message = {
    "is": "hello",
    "host": "a",
    "slots": 1,
    "token": "x",
    "via": "localhost",
    "ranks": [],
    "state": {},
}


def test_bad_messages_of_agents_are_refused(job: JoinableJob) -> None:
    ringrun = job.listen("--min-np", "4", "-H", "localhost:1", *job.rank)
    agent = job.join("there")
    agent.wait_for("joined the job")
    wrong: list[tuple[Message, str]] = [
        ({"slots": 0}, "host a has 0 slots"),
        ({"slots": True}, "host a has True slots"),
        ({"slots": 1 << 40}, "slots"),
        ({"host": "-oProxy"}, "is not a host name"),
        ({"host": 3}, "it said no host"),
        ({"via": ""}, "it said no host"),
        ({"host": "localhost"}, "localhost is a host of ringrun's own"),
        ({"is": "bye"}, "it said no hello"),
        ({"token": None}, "it said no hello"),
        ({"ranks": [{"id": -1, "pid": 1, "local_rank": 0}]}, "it has a rank"),
        ({"ranks": [{}]}, "id"),
        ({"ranks": 5}, "iterable"),
        ({"state": STATE | {"next": "x"}}, "it remembers"),
        ({"state": STATE | {"hosts": [[0, 1]]}}, "it remembers hosts"),
        ({"state": STATE | {"hosts": [7]}}, ""),
        ({"state": STATE | {"job": "../x"}}, "it remembers job"),
        ({"state": {"job": "1" * 16}}, "hosts"),
    ]
    for change, why in wrong:
        sock, exchange = _connect_as_agent(job)
        with sock:
            answer = exchange({**HELLO, **change})
        assert answer["do"] == "refuse" and not answer["retry"], change
        assert why in answer["text"]
    sock, exchange = _connect_as_agent(job)
    with sock:
        answer = exchange({**HELLO, "host": "there"})
    assert answer["retry"]
    assert answer["text"] == "a host there is here already, from 127.0.0.1"
    with socket.create_connection(("127.0.0.1", job.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" * 20)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    ringrun.wait_for("does not speak ringjax")
    who = HandshakeRequest(_JOB, Purpose.RENDEZVOUS, 0, -1)
    with pytest.raises(Exception, match="closed the connection"):
        connect_to_server(
            f"127.0.0.1:{job.port}", job.secret, who, time.monotonic() + LONG
        )
    ringrun.kill(signal.SIGTERM)
    assert ringrun.wait() == agent.wait() == 143


def test_two_hosts_with_one_name(job: JoinableJob) -> None:
    ringrun = job.listen("--min-np", "1", "-np", "2", *job.rank)
    first = job.join("a")
    first.wait_for("joined the job")
    second = job.join("a")
    second.wait_for("not yet: a host a is here already, from 127.0.0.1")
    first.kill()
    second.wait_for("joined the job")
    assert len(second.lines("not yet")) == 1
    ringrun.kill(signal.SIGTERM)
    assert ringrun.wait() == second.wait() == 143
    first.wait()


# Elastic jobs.


def _begin(job: JoinableJob, *words: str) -> tuple[Process, list[Process]]:
    ringrun = job.listen(
        "-np", "3", "--min-np", "1", "--max-np", "8", *words, *job.rank
    )
    agents = [job.join("a"), job.join("b", 2)]
    ringrun.wait_for("epoch 0 start: ./3", 3)
    return ringrun, agents


def test_hosts_join_and_leave(job: JoinableJob) -> None:
    ringrun, agents = _begin(job)
    agents.append(job.join("c", 2))
    ringrun.wait_for("resize: ./5", 5)
    agents[1].kill()
    ringrun.wait_for(r"repair: ./3", 3)
    agents[1].wait()
    again = job.join("b", 2)
    ringrun.wait_for("resize: ./5", 10)
    job.end()
    assert ringrun.wait() == 0, ringrun.output
    assert [p.wait() for p in (agents[0], agents[2], again)] == [0, 0, 0]
    # One line is about the ranks' host, the other about the connection.
    assert len(ringrun.lines(" lost")) == 2
    assert not ringrun.lines("asked to leave")


def test_sigterm_makes_a_host_leave(job: JoinableJob) -> None:
    ringrun, agents = _begin(job)
    agents[1].kill(signal.SIGTERM)
    ringrun.wait_for("epoch . resize: 0/1")
    assert agents[1].wait() == 143
    assert len(ringrun.lines("asked to leave: its slot is gone")) == 2
    assert ringrun.output.count("Dismiss") == 2
    job.end()
    assert ringrun.wait() == 0, ringrun.output
    assert agents[0].wait() == 0


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [
        (signal.SIGTERM, 143, " was killed by signal 15 (SIGTERM)"),
        (signal.SIGKILL, 255, ": lost its host, whose agent is gone"),
    ],
)
def test_an_ended_agent_fails_a_job_of_fixed_size(
    job: JoinableJob, number: int, code: int, why: str
) -> None:
    agents = [job.join("a"), job.join("b")]
    ringrun = job.listen("-np", "2", "sleep", "60")
    until(lambda: _texts(job).count("sleep 60") == 2)
    agents[1].kill(number)
    assert ringrun.wait() == code
    assert ringrun.lines(f"rank 1 (b){why}"), ringrun.output
    assert agents[0].wait() == code
    assert agents[1].wait() == (code if number == signal.SIGTERM else -number)


def test_a_killed_launcher_ends_a_job_of_fixed_size(
    job: JoinableJob,
) -> None:
    agent = job.join("a")
    ringrun = job.listen("-np", "1", "sleep", "60")
    ringrun.wait_for("host a has come")
    until(lambda: "sleep 60" in _texts(job))
    ringrun.kill()
    ringrun.wait()
    assert agent.wait() == 1
    assert agent.lines(f"the ringrun at localhost:{job.port} is gone")
    assert "sleep 60" not in _texts(job)


def _texts(job: JoinableJob) -> list[str]:
    return list(leaks.processes(job.id).values())


def test_a_restarted_launcher_continues_the_job(job: JoinableJob) -> None:
    ringrun, agents = _begin(job, "-H", "localhost:1")
    ringrun.wait_for("resize: ./4", 4)
    pids = [pid for worker in range(4) for pid in job.pids(worker)]
    ringrun.kill()
    ringrun.wait()
    agents[1].wait_for("2 ranks here go on, and another is looked for")
    again = job.listen(
        "-np", "3", "--min-np", "1", "--max-np", "8", "-H", "localhost:1", *job.rank
    )
    # A new worker joins on another host.
    again.wait_for("epoch . resize: ./4", 4, also=agents)
    # The agent on the killed ringrun's own host has one second to end.
    until(lambda: sum(_runs(pid) for pid in pids) == 3)
    assert job.pids(4) and not job.pids(5)
    agents[0].kill()
    agents[0].wait()
    again.wait_for("was declared lost: lost its connection .*; 3 ranks go on")
    job.end()
    assert again.wait() == 0, again.output
    assert agents[1].wait() == 0
    assert len(agents[1].lines("joined")) == 1


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_sigterm_makes_all_ranks_leave(job: JoinableJob) -> None:
    ringrun, agents = _begin(job, "-H", "localhost:1")
    ringrun.wait_for("resize: ./4", 4)
    pids = job.pids(0) + job.pids(1) + job.pids(2) + job.pids(3)
    ringrun.kill(signal.SIGTERM)
    assert ringrun.wait() == 143
    assert "the job goes on, and waits for another ringrun" in ringrun.output
    assert ringrun.output.count("Dismiss") == 1
    assert sum(_runs(pid) for pid in pids) == 3
    again = job.listen("-np", "3", "--min-np", "1", "-H", "localhost:1", *job.rank)
    again.wait_for("epoch . resize: ./4", 4, also=agents)
    (own,) = job.pids(4)
    os.kill(own, signal.SIGSTOP)
    again.kill(signal.SIGTERM)
    again.wait_for("on localhost, pid .* is asked to leave: its slot is gone")
    again.kill(signal.SIGINT)  # the second signal ends it
    assert again.wait() == 130
    assert [agent.wait() for agent in agents] == [130, 130]


def test_launcher_and_a_host_are_lost_together(job: JoinableJob) -> None:
    ringrun, agents = _begin(job, "-H", "localhost:1")
    ringrun.wait_for("resize: ./4", 4)
    pids = [pid for worker in range(4) for pid in job.pids(worker)]
    ringrun.kill()
    agents[1].kill()
    ringrun.wait()
    agents[1].wait()
    words = ["-np", "3", "--min-np", "1", "--max-np", "8", "-H", "localhost:1"]
    again = job.listen(*words, *job.rank)
    # A new agent with the same host name proves that the host's old workers have ended.
    agents[1] = job.join("b", 2)
    again.wait_for("epoch . resize: ./4", 4, also=agents)
    until(lambda: sum(_runs(pid) for pid in pids) == 1)  # the job did not start again
    job.end()
    assert again.wait() == 0, again.output
    assert [agent.wait() for agent in agents] == [0, 0]


def test_a_new_job_ends_the_ranks_of_the_old_one(
    job: JoinableJob,
) -> None:
    ringrun, agents = _begin(job)
    ringrun.kill()
    ringrun.wait()
    agents[0].wait_for("1 rank here go on")
    pid = job.pids(0) + job.pids(1) + job.pids(2)
    again = job.listen("-np", "3", *sh("exit 3"))  # a new job
    assert again.wait() == 3, again.output
    assert [agent.wait() for agent in agents] == [3, 3]
    assert all(agent.lines("another job has begun") for agent in agents)
    assert not any(_runs(each) for each in pid)


def test_a_restarted_launcher_learns_of_ended_ranks(
    job: JoinableJob,
) -> None:
    ringrun, agents = _begin(job)
    ringrun.kill()
    ringrun.wait()
    agents[1].wait_for("go on")
    job.end()
    until(lambda: not [t for t in _texts(job) if "script.py" in t])
    again = job.listen("-np", "3", "--min-np", "1", *job.rank)
    assert again.wait() == 0, again.output
    assert [agent.wait() for agent in agents] == [0, 0]
    assert not again.lines("epoch")  # the job did not start again


def test_a_broken_agent_connection_loses_no_rank(job: JoinableJob) -> None:
    target = ("127.0.0.1", job.port)
    with FaultProxy(target) as proxy:
        words = ["-np", "3", "--min-np", "1", "--max-np", "3"]
        silence = {"RINGJAX_FAILURE_TIMEOUT": "3"}
        ringrun = job.listen(*words, *job.rank, **silence)
        agents = [
            job.join("a", **silence),
            job.join("b", 2, port=proxy.address[1], **silence),
        ]
        ringrun.wait_for("epoch 0 start: ./3", 3)
        pids = [job.pids(worker) for worker in range(3)]
        # The agent has connected several times if it started before ringrun listened.
        before = proxy.connections
        proxy.cut()
        agents[1].wait_for("is gone: 2 ranks here go on, and another is looked for")
        until(lambda: proxy.connections > before)
        time.sleep(4)  # longer than the failure timeout
        assert [job.pids(worker) for worker in range(3)] == pids
        job.end()
        assert ringrun.wait() == 0, ringrun.output
        assert [agent.wait() for agent in agents] == [0, 0]
        assert len(ringrun.lines("has come")) == 2 and not ringrun.lines("lost")
