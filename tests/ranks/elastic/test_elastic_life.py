"""An elastic job in all its states: workers join, leave, restart, wait, and end.

test_recovery.py tests the results of calls when ranks are lost.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support.elastic_job import Start
from support.elastic_steps import EAGER, stop_loops, wait_for_first_steps
from support.fabric import fabric_env, needs_fabric
from support.launch import StartJob

# The loop of ringjax.elastic.run, spelled out. The state is the number of steps.
ELASTIC = """
from ringjax import _native, errors, eager

state = [0]

def add_all():
    x, out = np.full(33, 2.0**WORKER), np.empty(33)
    runtime.communicator().execute(
        _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"], [x], [out])
    return int(out[0])

def sync(ranks):
    with runtime.private_communicator(ranks) as native:
        x = np.array(state)
        native.execute(_native.COLLECTIVES["broadcast"], 1, [x], [x])
        state[0] = int(x[0])

if runtime.is_newcomer():
    say("newcomer", ringjax.rank(), ringjax.size())
    with runtime.solo_mode():
        say("alone", add_all(), eager.allreduce(np.ones(3), name="x").tolist())
    say("outside", runtime.has_run_solo())
    say("outside", eager.allreduce(np.ones(2), name="x").tolist(), add_all())
    say("outside", runtime.has_run_solo())
    runtime.request_admission()
    say("admitted", runtime.epoch_info())
    sync([0, *runtime.epoch_info().newcomers])

def leave(*_):
    runtime.leave_at_next_pause()

signal.signal(signal.SIGTERM, leave)

def restart(error):
    say("failed", error)
    runtime.restart(str(error))
    state[0] = state[0] // 10 * 10
    sync(range(runtime.size()))
    say("restarted", state[0], runtime.epoch_info().kind)

while not os.path.exists(sys.argv[0] + ".stop"):
    try:
        number, epoch = runtime.check_updates()
    except errors.RingjaxError as error:  # a rank that is one call ahead has failed
        restart(error)
        continue
    if number:
        if not runtime.pause(number):
            say("left")
            sys.exit(0)
        newcomers = runtime.epoch_info().newcomers
        say("paused", runtime.epoch_info().size)
        if newcomers and runtime.rank() in (0, *newcomers):
            sync([0, *newcomers])
        continue
    try:
        if os.path.exists(sys.argv[0] + f".fail{WORKER}"):
            os.unlink(sys.argv[0] + f".fail{WORKER}")
            raise errors.RingjaxError("requested by the test")
        total = add_all()
        eager.allreduce(np.ones(5), op=ringjax.Sum)
    except (errors.RingjaxError, _native.StatusError) as error:
        restart(error)
        continue
    state[0] += 1
    say("state", state[0], total, ringjax.size(), runtime.last_contributors())
say("end", state[0], ringjax.rank())
"""


# One host; or two, which libfabric connects.
@pytest.mark.parametrize(
    ("hosts", "env"),
    [(0, {}), pytest.param(2, fabric_env(), marks=needs_fabric)],
    ids=["shm", "fabric"],
)
def test_workers_join_leave_and_restart(
    start: Start, hosts: int, env: dict[str, str]
) -> None:
    job = start(3, ELASTIC, max_np=4, hosts=hosts, env=env)
    for worker in range(3):
        job.wait_for_line(worker, "state", 20)
    assert job.add() == 3
    job.wait_for_line(3, "state", 20)
    assert job.lines(3, "newcomer")[0] == ["3", "4"]
    assert " ".join(job.lines(3, "alone")[0]) == "8 [1.0, 1.0, 1.0]"
    outside = [" ".join(words) for words in job.lines(3, "outside")]
    assert outside == ["False", "[1.0, 1.0] 8", "True"]
    assert job.errors(3).count("this rank alone: it has come to a job") == 1
    job.kill(1, signal.SIGTERM)
    assert job.wait(1) == 0, job.logs()
    job.wait_for_line(3, "paused")
    job.create_flag("fail2")
    for worker in (0, 2, 3):
        job.wait_for_line(worker, "restarted")
        assert job.lines(worker, "restarted")[0][1] == "restart"
    count = len(job.lines(0, "state"))
    job.wait_for_line(0, "state", count + 20)
    job.kill(0)
    count = len(job.lines(3, "state"))
    job.wait_for_line(3, "state", count + 20)
    stop_loops(job)
    assert (job.wait(2), job.wait(3)) == (0, 0), job.logs()
    # One worker may see the file that stops the job a step before the other worker.
    ends = [int(job.lines(worker, "end")[0][0]) for worker in (2, 3)]
    assert abs(ends[0] - ends[1]) <= 1, job.logs()
    assert job.lines(2, "end")[0][1] == "0"
    assert job.lines(3, "end")[0][1] in ("0", "1")  # 0 if worker 2 has ended before
    by_state: dict[str, set[str]] = {}
    for worker in (0, 2, 3):
        for number, *rest in job.lines(worker, "state"):
            by_state.setdefault(number, set()).add(" ".join(rest))
    latest = [next(iter(x)) for x in by_state.values() if len(x) == 1]
    assert "15 4 (0, 1, 2, 3)" in latest
    assert "13 3 (0, 2, 3)" in latest
    assert "12 2 (2, 3)" in latest


# Prints in each epoch the inodes of the control connections to all other ranks. On one
# host, the world has no other sockets.
KEPT = ELASTIC.replace(
    "    total = add_all()\n",
    """    total = add_all()
        epoch = lifecycle._world.epoch
        if epoch.number not in shown:
            shown.add(epoch.number)
            say("sockets", *(inode for _, inode in epoch._sockets[0]))
""",
).replace(
    "state = [0]\n",
    "from ringjax.runtime import lifecycle\nstate, shown = [0], set()\n",
)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_control_connections_outlive_losses_and_newcomers(
    start: Start, size: int
) -> None:
    job = start(size, KEPT, max_np=size)
    survivors = [worker for worker in range(size) if worker != 1]

    def wait_for_sockets(epochs: int) -> dict[int, set[str]]:
        for worker in survivors:
            job.wait_for_line(worker, "sockets", epochs)
        return {w: set(job.lines(w, "sockets")[epochs - 1]) for w in survivors}

    first = wait_for_sockets(1)
    job.kill(1)
    second = wait_for_sockets(2)
    newcomer = job.add()
    third = wait_for_sockets(3)
    job.wait_for_line(newcomer, "sockets")
    for worker in survivors:
        kept = first[worker] & second[worker]
        assert len(kept) == size - 2
        assert kept == second[worker] & third[worker]
        assert len(third[worker]) == size - 1
    stop_loops(job)
    assert [job.wait(w) for w in (*survivors, newcomer)] == [0] * size, job.logs()


LEAKS = """
from ringjax import _native, errors

def add_all():
    x, out = np.full(33, 2.0**WORKER), np.empty(33)
    runtime.communicator().execute(
        _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"], [x], [out])
    return int(out[0])

def resources():
    import gc
    gc.collect()
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:ringjax" in line for line in maps)
    threads = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), threads, shared

add_all()
before = resources()
for i in range(20):
    runtime.restart(f"number {i}")
    assert add_all() == 7
deadline = time.monotonic() + 20
while any(a > b for a, b in zip(resources(), before)) and time.monotonic() < deadline:
    time.sleep(0.05)
say("after", *resources())
say("before", *before)
assert add_all() == 7
pid = os.fork()
if pid == 0:
    try:
        add_all()
    except errors.RingjaxError as error:
        say("child", ringjax.rank(), error)
    os._exit(0)
os.waitpid(pid, 0)
assert add_all() == 7
ringjax.shutdown()
"""


def test_twenty_epochs_leak_nothing_and_a_fork_is_harmless(start: Start) -> None:
    job = start(3, LEAKS)
    assert [job.wait(w) for w in range(3)] == [0, 0, 0], job.logs()
    for worker in range(3):
        before, after = job.lines(worker, "before")[0], job.lines(worker, "after")[0]
        pairs = zip(map(int, before), map(int, after), strict=True)
        assert all(old >= new for old, new in pairs), job.logs()
        assert "was forked from one" in " ".join(job.lines(worker, "child")[0])


def test_ctrl_c_while_too_few_workers_are_left(start: Start) -> None:
    job = start(2, EAGER, min_np=2)
    wait_for_first_steps(job)
    job.kill(1)
    job.wait_for(lambda: any(e[0] == "waiting" for e in job.all_events()), "it waits")
    count = -1
    while count < len(job.lines(0, "step")):  # until worker 0 makes no more steps
        count = len(job.lines(0, "step"))
        time.sleep(0.5)
    job.kill(0, signal.SIGINT)
    assert job.wait(0) != 0
    assert "KeyboardInterrupt" in job.errors(0), job.logs()


def test_the_job_ends_with_a_reason_if_no_worker_joins(start: Start) -> None:
    job = start(2, EAGER, min_np=2, elastic_timeout=1.0)
    wait_for_first_steps(job)
    job.kill(1)
    assert job.wait(0) != 0, job.logs()
    assert "the job was stopped" in job.errors(0), job.logs()


SHUTDOWN_DURING_CALL = """
import threading
from ringjax import errors

def work():
    try:
        while True:
            add_all()
    except Exception as error:
        say("thread", type(error).__name__, error)

thread = threading.Thread(target=work)
thread.start()
while not os.path.exists(sys.argv[0] + ".stop"):
    time.sleep(0.01)
began = time.monotonic()
ringjax.shutdown()
thread.join()
say("down", time.monotonic() - began)
try:
    ringjax.init()
except errors.StartupError as error:
    say("refused", error)
"""


def test_shutdown_ends_calls_that_wait_for_other_ranks(start: Start) -> None:
    begin = time.monotonic()
    definitions = LEAKS.partition("def resources")[0]
    script = definitions + "say('up', add_all())" + SHUTDOWN_DURING_CALL
    job = start(2, script, min_np=2)
    for worker in (0, 1):
        job.wait_for_line(worker, "up")
    seconds = time.monotonic() - begin  # less than 1 s on an idle machine
    job.kill(1)
    job.wait_for(lambda: any(e[0] == "waiting" for e in job.all_events()), "it waits")
    stop_loops(job)
    assert job.wait(0) == 0, job.logs()
    assert float(job.lines(0, "down")[0][0]) < 2 + 2 * seconds
    assert "ringjax.shutdown() was called" in " ".join(job.lines(0, "thread")[0])
    assert "cannot come back" in " ".join(job.lines(0, "refused")[0])


SIZES = """
import numpy as np
import ringjax
from ringjax import eager
from support.numpy_only import allreduce

ringjax.init()
for n in (0, 1, 1000, 65536, 262144, 1000001):
    for i in range(7):  # more often than the shared segment has slots
        x = np.full(n, i + 1.0, np.float32)
        assert (allreduce(x) == (i + 1) * ringjax.size()).all(), (n, i)
        eager.allreduce(x, op=ringjax.Sum, name="x", out=x)
        assert (x == (i + 1) * ringjax.size()).all(), (n, i)
print("all sizes", ringjax.size())
"""


@pytest.mark.parametrize("np", [2, 3])
@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "tcp"])
def test_every_size_without_a_loss(start_job: StartJob, np: int, shm: str) -> None:
    job = start_job(np, SIZES, {"RINGJAX_SHM": shm}, ["--min-np", "1"])
    assert job.wait() == 0, job.logs()
    for rank in range(np):
        assert f"all sizes {np}" in job.output(rank)


@pytest.mark.parametrize("shm", ["0", "1"])
def test_one_rank_alone_has_no_links_to_measure(
    start_job: StartJob, tmp_path: Path, shm: str
) -> None:
    """It is an elastic job of its own, which a second rank joins later."""
    (tmp_path / "slots").write_text("localhost:1")
    options = ["--host-discovery-script", f"cat {tmp_path / 'slots'}", "--min-np", "1"]
    env = {"RINGJAX_SHM": shm, "SLOTS": str(tmp_path / "slots")}
    job = start_job(1, ALONE, env, [*options, "--max-np", "2"])
    assert job.wait(50) == 0, job.logs()
    assert job.launcher_output().count("the sum of 2 ranks is 2.0") == 2


ALONE = """
import os, time
import numpy as np
import ringjax
from ringjax import eager, elastic
from support import numpy_only

ringjax.init()
state = elastic.State(step=0)

@elastic.run
def train(state):
    while ringjax.size() < 2:
        assert eager.allreduce(np.ones(3), op=ringjax.Sum).tolist() == [1.0] * 3
        state.step += 1
        if state.step == 5:
            open(os.environ["SLOTS"], "w").write("localhost:2")
        time.sleep(0.02)  # ringrun needs the core to start the second rank
        state.commit()
    return eager.allreduce(np.ones(1), op=ringjax.Sum)[0]

print(f"the sum of 2 ranks is {train(state)}", flush=True)
"""
