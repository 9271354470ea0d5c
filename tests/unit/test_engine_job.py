"""Tests of jobs whose processes an engine starts: tickets, losses, and results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.launch import environment
from support.waiting import until

from ringjax.errors import LaunchError
from ringjax.run.engine_job import EngineJob, places
from ringjax.runtime.reused_process import run_as_rank

RANK = """
import os, sys, time
import numpy as np
import ringjax
from ringjax import eager
from support import numpy_only

ringjax.init()
print(ringjax.rank(), ringjax.size(), ringjax.local_rank(), ringjax.cross_size(),
      int(numpy_only.allreduce(np.ones(3))[0]))
"""
LOOP = """
@ringjax.elastic.run
def loop(state):
    while state.step < 200 or ringjax.size() < int(sys.argv[1]):
        numpy_only.allreduce(np.ones(3))
        state.step += 1
        time.sleep(0.01)
        state.commit()

loop(ringjax.elastic.State(step=0))
print("end", ringjax.rank(), ringjax.size())
"""


class Processes:
    """A minimal engine, which starts processes and detects their ends."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(
        self, script: str, ticket: Mapping[str, str], *words: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", script, *words],
            env=environment("engine-job", ticket),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        return process

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture
def engine() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a"], ["0 1 0 1 1"]),
        (["a", "b", "a"], ["0 3 0 2 3", "1 3 0 2 3", "2 3 1 1 3"]),
    ],
)
def test_a_job_of_fixed_size(
    engine: Processes, nodes: list[str], expected: list[str]
) -> None:
    with EngineJob(len(nodes), hosts=["127.0.0.1"]) as job:
        for _ in range(2):  # tickets can be used again
            tickets = job.tickets(nodes)
            running = [engine.start(RANK, ticket) for ticket in tickets]
            for number, process in enumerate(running):
                out, err = process.communicate(timeout=40)
                assert process.returncode == 0, err
                job.finished(number, out.strip())
            assert job.over
            assert job.results() == expected
            job.again()


def test_the_first_failed_worker_is_named(engine: Processes) -> None:
    script = RANK + "\nif ringjax.rank() == 1: raise ValueError('boom')\n"
    script += "eager.barrier()\n"
    with EngineJob(2, hosts=["127.0.0.1"]) as job:
        running = [engine.start(script, t) for t in job.tickets(["one", "two"])]
        for number, process in enumerate(running):
            _, err = process.communicate(timeout=40)
            assert process.returncode != 0
            job.lost(number, err)
        assert job.over
        with pytest.raises(
            LaunchError, match=r"rank 1 \(on two\): ValueError: boom"
        ) as e:
            job.results()
    assert e.value.rank == 1
    assert "Traceback" in str(e.value)


def test_a_dismissed_worker_may_return_before_its_event() -> None:
    with EngineJob(2, min_size=1, hosts=["127.0.0.1"]) as job:
        job.tickets(["one", "two"])
        assert job._coordinator is not None
        job._coordinator.events.put(("dismissed", 0, "it is asked to leave"))
        job.finished(0)
        assert job.running() == [1] and not job.closing  # another worker may join


@pytest.mark.parametrize("certain", [True, False])
def test_joining_workers_start_again_if_the_last_member_ended(certain: bool) -> None:
    with EngineJob(1, min_size=1, max_size=2, hosts=["127.0.0.1"]) as job:
        job.tickets(["one"])
        job.ticket(1, "two")
        for event in (("members", 0, "start", {0: 0}), ("ready", 1)):
            job._coordinator.events.put(event)
        job.poll()
        job.lost(0, "killed", certain=certain)
        assert job.over == (not certain)  # an unreachable worker may still run


def test_a_worker_that_failed_before_joining_is_named() -> None:
    with EngineJob(2, min_size=1, hosts=["127.0.0.1"]) as job:
        job.tickets(["one", "two"])
        job.lost(1, "Traceback\nValueError: boom")
        assert not job.over
        job.lost(0, "it is gone")
        assert job.over
        with pytest.raises(
            LaunchError, match=r"^worker 1 \(on two\): ValueError: boom"
        ):
            job.results()


def test_a_job_of_variable_size(engine: Processes) -> None:
    notes: list[str] = []
    with EngineJob(
        2, min_size=1, max_size=3, hosts=["127.0.0.1"], note=notes.append
    ) as job:
        script = RANK + LOOP
        tickets = job.tickets(["one", "two"])
        # Programs for Horovod read these variables.
        assert [t["HOROVOD_RANK"] + t["HOROVOD_SIZE"] for t in tickets] == ["02", "12"]
        running = {n: engine.start(script, t, "3") for n, t in enumerate(tickets)}
        _until(job, lambda: len(job.members) == 2)
        assert job.members == {0: 0, 1: 1}
        running[1].send_signal(signal.SIGKILL)
        running[1].wait(10)
        job.lost(1, "killed")
        _until(job, lambda: list(job.members) == [0])
        for number in (2, 7):  # any new number is allowed
            ticket = job.ticket(number, "three")
            assert ticket["HOROVOD_RANK"] == {2: "1", 7: "2"}[number]
            running[number] = engine.start(script, ticket, "3")
        with pytest.raises(ValueError, match="worker 7 is not new"):
            job.ticket(7)
        for number in (0, 2, 7):
            out, err = running[number].communicate(timeout=50)
            assert running[number].returncode == 0, err
            job.finished(number, out.split("end ")[1].split()[1])
        _until(job, lambda: job.over)
        assert job.results() == ["3", "3", "3"]
        assert job.resets >= 2
    assert any("on three joined as rank 1" in note for note in notes)


def _until(job: EngineJob, condition: Callable[[], object]) -> None:
    until(lambda: (job.poll(), condition())[1])


def test_missing_workers_are_named(engine: Processes) -> None:
    env = {"RINGJAX_START_TIMEOUT": "4"}
    with EngineJob(2, hosts=["127.0.0.1"], env=env) as job:
        tickets = job.tickets(["one", "two"])
        _, err = engine.start(RANK, tickets[0]).communicate(timeout=40)
        assert "rank 1 of 2 did not join" in err
        _until(job, lambda: job.over)
        with pytest.raises(
            LaunchError, match="did not start: rank 1 of 2 did not join"
        ):
            job.results()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"size": 0}, "size=0: expected a number from 1 on"),
        ({"size": 2, "max_size": 3}, "only elastic jobs have one; give min_size"),
        ({"size": 2, "min_size": 3}, "size=2: expected .* between min_size=3 and 2"),
        ({"size": 3, "min_size": 1, "max_size": 2}, "between min_size=1 and 2"),
    ],
)
def test_bad_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineJob(**sizes)  # type: ignore[arg-type]


def test_a_node_count_must_divide_the_size() -> None:
    with (
        EngineJob(2, hosts=["127.0.0.1"]) as job,
        pytest.raises(ValueError, match="2 workers, but 1 nodes"),
    ):
        job.tickets(["one"])


def test_a_nested_job_ignores_the_outer_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer = {"RINGJAX_RANK": "3", "RINGJAX_SIZE": "4", "RINGJAX_SECRET": "ab" * 32}
    for name, value in {**outer, "RINGJAX_ELASTIC": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RINGJAX_HEARTBEAT", "0.5")
    with EngineJob(1, hosts=["127.0.0.1"]) as job:
        ticket = job.tickets(["one"])[0]
    assert ticket["RINGJAX_RANK"] == "0"
    assert ticket["RINGJAX_SECRET"] != "ab" * 32
    assert ticket["RINGJAX_HEARTBEAT"] == "0.5"
    assert "RINGJAX_ELASTIC" not in ticket


def test_local_ranks_of_uneven_nodes() -> None:
    found = places(["b", "a", "b", "b"])
    keys = ("RINGJAX_RANK", "RINGJAX_LOCAL_RANK", "RINGJAX_CROSS_SIZE")
    assert [tuple(place[key] for key in keys) for place in found] == [
        ("0", "0", "2"),
        ("1", "0", "2"),
        ("2", "1", "1"),
        ("3", "2", "1"),
    ]


def test_run_as_rank_restores_the_environment(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert run_as_rank({"OURS": "yes"}, os.getenv, ["OURS"]) == "yes"
    assert run_as_rank({}, sys.exit) is None
    with pytest.raises(RuntimeError, match="it ended with exit code 3"):
        run_as_rank({"OURS": "yes"}, sys.exit, [3])
    assert dict(os.environ) == before


def test_workers_can_join_a_new_driver_at_the_old_address(engine: Processes) -> None:
    """The first job has ended. The second has the same port, secret, and job number."""
    script = RANK + LOOP
    with EngineJob(2, min_size=1, max_size=3, hosts=["127.0.0.1"]) as first:
        tickets = first.tickets(["one", "two"])
        running = {n: engine.start(script, t, "3") for n, t in enumerate(tickets)}
        _until(first, lambda: len(first.members) == 2)
    port = int(tickets[0]["RINGJAX_RENDEZVOUS"].rpartition(":")[2])
    secret = bytes.fromhex(tickets[0]["RINGJAX_SECRET"])
    known = {"hosts": ["127.0.0.1"], "port": port, "secret": secret, "job": first.job}
    with EngineJob(2, min_size=1, max_size=3, **known) as second:  # type: ignore[arg-type]
        _until(second, lambda: second.members == {0: 0, 1: 1})
        running[2] = engine.start(script, second.ticket(2, "three"), "3")
        for number, process in running.items():
            _, err = process.communicate(timeout=50)
            assert process.returncode == 0, err
            second.finished(number)
        _until(second, lambda: second.over)
        assert second.results() == [None] * 3
