"""Jobs whose hosts are connected by a stub of libfabric, which does what cards do.

The ranks of one machine name different hosts. tests/native/ofi_stub_test.cc tests the
links alone; these tests say what a job makes of them.
"""

from __future__ import annotations

import re

import pytest
from support.fabric_stub import fabric_stub_environment
from support.launch import Job, StartJob

pytestmark = pytest.mark.timeout(120)  # the first test may have to build the stub

# STRANGE is a variable of the stub for rank 1, whose card is the only strange one then.
HEAD = """
import os, signal, sys

rank = int(os.environ["RINGJAX_RANK"])
os.environ["RINGJAX_HOSTNAME"] = f"host{rank}"
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ringrun's after a loss; see `caught`
if rank == 1 and "STRANGE" in os.environ:
    name, _, value = os.environ["STRANGE"].partition("=")
    os.environ[name] = value

import numpy as np
import ringjax
from support.numpy_only import allreduce
from ringjax import eager, errors

def caught(error):
    os.write(1, f"caught {type(error).__name__} of {error.rank}: {error}\\n".encode())

def maps(name="maps"):
    with open(f"/proc/self/{name}") as text:
        return text.read()

ringjax.init()
size = ringjax.size()
"""

# Integers in float32, so that all results are exact.
EXCHANGE = (
    HEAD
    + """
assert "ofi_stub/libfabric.so.1" in maps()

def own(n, of=rank):
    return ((np.arange(n) * 7 + 13 * of) % 251).astype("f4")

for n in (1, 3000, 400_000):
    every = [own(n, r) for r in range(size)]
    handles = [eager.allreduce_async(own(n), ringjax.Sum, name=f"{n} {i}")
               for i in range(3)]
    for handle in handles:
        assert np.array_equal(eager.synchronize(handle), sum(every))
    assert np.array_equal(allreduce(own(n), name="jit"), sum(every))
    assert np.array_equal(eager.allgather(own(n), name="g"), np.concatenate(every))
    for root in range(size):
        assert np.array_equal(eager.broadcast(own(n), root, name="b"), every[root])
    splits = [n // size] * (size - 1) + [n - n // size * (size - 1)]
    at = sum(splits[:rank])
    moved, _ = eager.alltoall(own(n), splits=splits, name="a")
    expected = [x[at : at + splits[rank]] for x in every]
    assert np.array_equal(moved, np.concatenate(expected))
some = ringjax.add_process_set([0, size - 1])
if some.included():
    total = eager.allreduce(own(5000), ringjax.Sum, name="s", process_set=some)
    assert np.array_equal(total, own(5000, 0) + own(5000, size - 1))
ringjax.shutdown()
"""
)


@pytest.mark.parametrize(
    "settings",
    [
        {"OFI_STUB_EAGAIN": 30, "OFI_STUB_LAZY": 1},
        {"OFI_STUB_REORDER": 1, "OFI_STUB_BUSY_WAITS": 3},
        {"OFI_STUB_WAIT": "none"},
        {
            "OFI_STUB_MR": "local,endpoint,prov_key",
            "OFI_STUB_TAGS": 48,
            "OFI_STUB_INJECT": 0,
            "OFI_STUB_TX": 8,
            "OFI_STUB_RX": 64,
        },
    ],
    ids=["refuses", "reorders", "no descriptor", "small"],
)
def test_results_are_right_whatever_a_card_does(
    start_job: StartJob, settings: dict[str, str | int]
) -> None:
    job = start_job(3, EXCHANGE, env=fabric_stub_environment(**settings))
    assert job.wait(100) == 0, job.logs()


# Goes on until something fails. Rank 1 sends more than a hundred messages before.
FAIL = (
    HEAD
    + """
try:
    for i in range(100_000):
        total = allreduce(np.full(30_000, rank + 1.0, "f4"), name="grads")
        assert (total == size * (size + 1) / 2).all(), "a wrong sum"
        if i == 100:
            print("moving", flush=True)
except errors.RingjaxError as error:
    caught(error)
    sys.exit(7)
"""
)


def run_until_caught(
    start_job: StartJob, strange: str, **settings: str
) -> tuple[Job, list[str]]:
    """Runs a job whose rank 1 has a strange card. Returns what each rank caught."""
    env = fabric_stub_environment() | {"STRANGE": strange} | settings
    job = start_job(3, FAIL, env=env)
    job.wait(50)
    outputs = [job.output(rank) for rank in range(3)]
    for output in outputs:
        assert "caught" in output, job.logs()
        assert "libfabric stub:" not in output, job.logs()
    return job, [output.partition("caught ")[2] for output in outputs]


@pytest.mark.parametrize(
    ("operation", "text"),
    [("send", "No route to host"), ("receive", "Input/output error")],
)
def test_an_error_of_a_card_names_the_peer_and_says_what_happened(
    start_job: StartJob, operation: str, text: str
) -> None:
    job, errors = run_until_caught(start_job, f"OFI_STUB_FAIL={operation}:200")
    for error in errors:  # all ranks agree on it
        assert re.match(r"PeerLost of [02]:", error), job.logs()
        assert text in error, job.logs()


def test_a_host_that_cannot_lock_memory_is_named(start_job: StartJob) -> None:
    limit = "OFI_STUB_MEMLOCK=250000"  # enough for small slots only
    job, errors = run_until_caught(start_job, limit)
    for error in errors:
        assert "rank 1 cannot register" in error and "ulimit -l" in error, job.logs()


def test_a_silent_card_is_a_timeout_that_names_its_rank(start_job: StartJob) -> None:
    limit = {"RINGJAX_COLLECTIVE_TIMEOUT": "2", "RINGJAX_FAILURE_TIMEOUT": "600"}
    silent = "OFI_STUB_SILENT_AFTER=300"
    job, errors = run_until_caught(start_job, silent, **limit)
    for rank in (0, 2):
        assert "rank 1" in errors[rank], job.logs()
    assert any(error.startswith("Stalled") for error in errors), job.logs()


# Some cards say so when a process is gone, and some never do.
@pytest.mark.parametrize("tells", [0, 1])
def test_a_killed_rank_is_named(start_job: StartJob, tells: int) -> None:
    limits = {"RINGJAX_COLLECTIVE_TIMEOUT": "600", "RINGJAX_FAILURE_TIMEOUT": "600"}
    env = fabric_stub_environment(OFI_STUB_TELL_LOST=tells) | limits
    job = start_job(3, FAIL, env=env)
    job.wait_for(1, "moving")
    job.kill(1)
    for rank in (0, 2):
        job.wait_for(rank, "caught PeerLost")
        assert "rank 1" in job.output(rank).partition("caught")[2], job.logs()


@pytest.mark.parametrize(
    "change",
    [
        "CHANGE=150:0:ffffffff",  # the number
        "CHANGE=150:4:ffffffff",  # the order
        "CHANGE=150:8:ffffffff",  # the length
        "CHANGE=150:12:ffffffff",  # the flags
        "CHANGE=150:16:ffffffffffffffff",  # the slots that it returns
        "LENGTH=150:3",
        "LENGTH=150:9000000",
    ],
)
def test_hostile_messages_are_refused_by_a_sentence(
    start_job: StartJob, change: str
) -> None:
    job, errors = run_until_caught(start_job, f"OFI_STUB_{change}")
    refused = [errors[rank] for rank in (0, 2) if "PeerLost of 1" in errors[rank]]
    assert refused, job.logs()


def test_a_hostile_first_message_ends_init_by_a_sentence(start_job: StartJob) -> None:
    env = fabric_stub_environment() | {"STRANGE": "OFI_STUB_CHANGE=1:0:ffffffff"}
    job = start_job(3, FAIL, env=env)
    assert job.wait(50) not in (0, 7), job.logs()
    sentence = "rank 1 has sent damaged messages over the fabric"
    assert any(sentence in job.output(rank) for rank in (0, 2)), job.logs()


def test_nothing_is_loaded_or_taken_while_the_fabric_is_off(
    start_job: StartJob,
) -> None:
    script = (
        HEAD
        + """
allreduce(np.ones(1_000_000, "f4"))
assert "libfabric" not in maps()
# The flag of memory that children do not inherit; only links over a fabric have it.
assert " dc" not in maps("smaps")
"""
    )
    env = fabric_stub_environment() | {"RINGJAX_FABRIC": "off"}
    job = start_job(2, script, env=env)
    assert job.wait(50) == 0, job.logs()
    env["RINGJAX_FABRIC"] = "stub"  # the same checks fail where it is on
    script = script.replace("not in", "in")
    job = start_job(2, script, env=env)
    assert job.wait(50) == 0, job.logs()
