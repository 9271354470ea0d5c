"""Jobs whose hosts are connected by libfabric, through its provider `tcp`.

The ranks of one machine name different hosts. No test needs a card: the provider `tcp`
uses sockets, and differs from ringjax's own TCP in everything else.
"""

from __future__ import annotations

import signal
import time

import pytest
from support.fabric import fabric_env, needs_fabric
from support.launch import Job, StartJob

pytestmark = needs_fabric

# Longer than a test, so that no timeout can be the cause of an error.
NO_TIMEOUTS = {"failure_timeout": "600", "collective_timeout": "600"}

# The ranks 0, 2, 4 … are on one host, and the others are on another.
HEAD = """
import hashlib, os, signal, sys, time

rank, size = (int(os.environ[f"RINGJAX_{x}"]) for x in ("RANK", "SIZE"))
os.environ["RINGJAX_HOSTNAME"] = f"host{rank % 2}"
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ringrun's after a loss; see `caught`

import numpy as np
import ringjax
from support import numpy_only
from ringjax import _native, eager, errors, runtime

def caught(error):
    os.write(1, f"caught {type(error).__name__}: {error}\\n".encode())

def is_loaded():
    with open("/proc/self/maps") as maps:
        return "libfabric" in maps.read()

def train(steps):
    for _ in range(steps):
        total = numpy_only.allreduce(np.full(300_000, rank + 1.0, "f4"), name="grads")
        assert total[-1] == size * (size + 1) / 2
"""

# Prints a digest of each result.
COLLECTIVES = (
    HEAD
    + """
ringjax.init()
assert is_loaded() == (os.environ["RINGJAX_FABRIC"] != "off")

def show(name, value):
    value = np.ascontiguousarray(value)
    found = hashlib.sha256(value.tobytes()).hexdigest()
    print("result", name, value.dtype, value.shape, found, flush=True)

def draw(n, dtype):
    values = np.random.default_rng([rank, n]).normal(size=n) * 5
    return values.astype(dtype)

some = ringjax.add_process_set([0, size - 1])
for dtype in ("bool", "int64", "float16", "float32", "complex128"):
    for n in (0, 1, 77, 4099, 300_001):
        x, tag = draw(n, dtype), f"{dtype} {n}"
        handles = {
            op: eager.allreduce_async(x, getattr(ringjax, op), name=f"{op} {tag}")
            for op in ("Sum", "Average", "Min", "Max", "Product")
            if (op, dtype) != ("Average", "bool")
            and (op not in ("Min", "Max") or dtype != "complex128")
        }
        for op, handle in handles.items():
            show(f"{op} {tag}", eager.synchronize(handle))
        show(f"broadcast {tag}", eager.broadcast(x, size - 1, name=f"b {tag}"))
        show(f"allgather {tag}", eager.allgather(x[: n - rank], name=f"g {tag}"))
        splits = [len(x[r::size]) for r in range(size)]
        moved, received = eager.alltoall(x, splits=splits, name=f"a {tag}")
        show(f"alltoall {tag}", moved)
        if dtype != "bool":
            part = eager.reducescatter(x, ringjax.Sum, name=f"r {tag}")
            show(f"reducescatter {tag}", part)
        if some.included():
            total = eager.allreduce(x, ringjax.Sum, name=f"s {tag}", process_set=some)
            show(f"process set {tag}", total)
xs = [draw(n, "float32") for n in (1, 5000, 70_000)]
for i, x in enumerate(eager.grouped_allreduce(xs, ringjax.Sum, name="grouped")):
    show(f"grouped allreduce {i}", x)
for i, x in enumerate(eager.grouped_allgather(xs, name="gathered")):
    show(f"grouped allgather {i}", x)
for i, x in enumerate(eager.grouped_reducescatter(xs, ringjax.Sum, name="scattered")):
    show(f"grouped reducescatter {i}", x)
if size & (size - 1) == 0:
    show("adasum", eager.allreduce(xs[1], ringjax.Adasum, name="adasum"))
show("object", np.array(eager.allgather_object({"rank": rank}, name="o")[-1]["rank"]))
native = runtime.communicator()
for algorithm, _ in _native.predict("allreduce", 1 << 20, native.hosts):
    native.set_cost({}, f"allreduce:{algorithm}", trial=True)
    for n in (1, 4099, 1_000_003):
        show(f"{algorithm} {n}", numpy_only.allreduce(draw(n, "float32")))
eager.barrier()
assert ringjax.remove_process_set(some) == (size > 2)
ringjax.shutdown()
"""
)


def results(job: Job, rank: int) -> list[str]:
    assert job.wait(100) == 0, job.logs()
    lines = job.output(rank).splitlines()
    return [line for line in lines if line.startswith("result")]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_collectives_have_the_results_of_tcp(
    start_job: StartJob, size: int
) -> None:
    plain = start_job(size, COLLECTIVES, env=fabric_env("off"))
    over_fabric = start_job(size, COLLECTIVES, env=fabric_env())
    for rank in range(size):
        expected = results(plain, rank)
        assert len(expected) > 200
        assert results(over_fabric, rank) == expected


# Both ends of a link between hosts get equal keys, as from the handshake of TLS, which
# only Python 3.13 has.
SEALED = COLLECTIVES.replace(
    "ringjax.init()",
    """
import dataclasses
from ringjax.links import factory

take = factory._FactoryRun.take_descriptors

def with_keys(run):
    found = take(run)
    links = []
    for index, fds, _ in found.links:
        ends = sorted([rank, run.ranks[index]])
        halves = [hashlib.sha512(f"{x} {ends}".encode()).digest()[:44] for x in ends]
        halves = halves if rank == ends[0] else halves[::-1]
        links.append((index, fds, [b"".join(halves)] * len(fds)))
    found.links = links
    return found

factory._FactoryRun.take_descriptors = with_keys
ringjax.init()
""",
    1,
)


@pytest.mark.timeout(150)
def test_encrypted_links_have_the_results_of_tcp(start_job: StartJob) -> None:
    plain = start_job(3, COLLECTIVES, env=fabric_env("off"))
    sealed = start_job(3, SEALED, env=fabric_env())
    for rank in range(3):
        assert results(sealed, rank) == results(plain, rank) != []


def test_links_are_made_when_a_call_needs_them(start_job: StartJob) -> None:
    """Ranks 3 apart have no link at first; then one of them is killed."""
    script = """
ringjax.init()
def fabric_links():  # "ofi_tcp", or "tcp;ofi_rxm" before libfabric 1.18
    transports = ringjax.stats()["transports"].items()
    return sum(links for name, links in transports if "ofi" in name)

before = fabric_links()
moved = eager.alltoall(np.arange(size) + 100 * rank, name="all")
assert moved.tolist() == [100 * other + rank for other in range(size)]
native = runtime.communicator()
which = _native.COLLECTIVES["alltoall"], 0
x, out = np.arange(size) + 100 * rank, np.zeros(size, "i8")
native.execute(*which, [x], [out], counts=[1] * 2 * size, name="all")
assert out.tolist() == moved.tolist()
assert fabric_links() > before
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        eager.alltoall(np.arange(size), name="again")
except errors.PeerLost as error:
    caught(error)
    raise
"""
    env = fabric_env(algorithm="alltoall:pairwise", **NO_TIMEOUTS)
    job = start_job(8, HEAD + script, env=env)
    assert job.wait(55) == 128 + signal.SIGKILL, job.logs()
    for rank in {*range(8)} - {3}:
        assert "rank 3" in job.output(rank).partition("caught")[2], job.logs()


def test_links_are_counted_under_the_name_of_the_provider(start_job: StartJob) -> None:
    script = """
ringjax.init()
train(1)
print("transports", ringjax.stats()["transports"], flush=True)
"""
    job = start_job(4, HEAD + script, env=fabric_env("tcp;ofi_rxm"))
    assert job.wait(50) == 0, job.logs()
    for rank in range(4):
        (line,) = [x for x in job.output(rank).splitlines() if "transports" in x]
        assert "'tcp;ofi_rxm': 2" in line and "'tcp':" not in line, job.logs()


@pytest.mark.parametrize("ends", ["exit", "_exit", "exec"])
def test_forked_children_do_not_disturb_the_links(
    start_job: StartJob, ends: str
) -> None:
    script = f"""
ringjax.init()
train(3)
for _ in range(10):
    child = os.fork()
    if child == 0:
        if "{ends}" == "exec":
            os.execv("/bin/true", ["true"])
        {{"exit": sys.exit, "_exit": os._exit}}["{ends}"](0)
    train(3)
    assert os.waitpid(child, 0)[1] == 0
some = ringjax.add_process_set(range(size - 1))  # makes new links
train(3)
ringjax.shutdown()
"""
    job = start_job(3, HEAD + script, env=fabric_env())
    assert job.wait(50) == 0, job.logs()


def test_a_killed_rank_is_named_though_its_child_lives(start_job: StartJob) -> None:
    script = """
ringjax.init()
train(3)
if rank == 1:
    child = os.fork()
    if child == 0:  # with copies of all descriptors
        time.sleep(600)
        os._exit(0)
    print("child", child, flush=True)
    time.sleep(600)
try:
    print("ready", flush=True)
    train(1)
except errors.PeerLost as error:
    caught(error)
"""
    job = start_job(3, HEAD + script, env=fabric_env(**NO_TIMEOUTS))
    job.wait_for(0, "ready")
    job.wait_for(2, "ready")
    job.wait_for(1, "child")
    job.kill(1)
    for rank in (0, 2):
        job.wait_for(rank, "caught PeerLost")
        assert "rank 1" in job.output(rank).partition("caught")[2]


# elastic/test_recovery.py has the other phases of a call, which only elastic jobs pass.
@pytest.mark.parametrize(
    "point", ["links.called", "links.shared", "call.agreed#7", "call.moving#7"]
)
def test_a_rank_that_is_killed_in_any_phase_is_named(
    start_job: StartJob, point: str
) -> None:
    script = """
try:
    ringjax.init()
    train(10**9)
except errors.RingjaxError as error:
    caught(error)
    raise
"""
    name, _, passage = point.partition("#")
    fault = f"{name}=kill@1#{passage or 1}"
    env = fabric_env(failpoints=fault, **NO_TIMEOUTS)
    job = start_job(5, HEAD + script, env=env)
    assert job.wait(50) == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2, 3, 4):
        text = job.output(rank).partition("caught ")[2]
        assert "rank 1" in text, job.logs()


def test_ctrl_c_ends_a_job_that_waits(start_job: StartJob) -> None:
    script = """
ringjax.init()
train(2)
print("ready", flush=True)
try:
    if rank == 0:
        time.sleep(600)
    train(1)
except BaseException as error:
    caught(error)
    raise
"""
    job = start_job(3, HEAD + script, env=fabric_env(**NO_TIMEOUTS))
    for rank in range(3):
        job.wait_for(rank, "ready")
    # Ranks 1 and 2 are probably in the collective by then. No event would tell, and an
    # interrupt just before the collective must end a rank alike.
    time.sleep(0.3)
    job.interrupt()
    assert job.wait(40) == 128 + signal.SIGINT, job.logs()
    outputs = [job.output(rank) for rank in range(3)]
    assert all("caught" in output for output in outputs), job.logs()
    assert any("KeyboardInterrupt" in output for output in outputs), job.logs()


INIT = """
try:
    ringjax.init()
except errors.RingjaxError as error:
    caught(error)
    raise
"""


@pytest.mark.parametrize(
    ("rank_1", "texts"),
    [
        ({"RINGJAX_FABRIC": "nosuch"}, ["rank 1 on host1 has RINGJAX_FABRIC=nosuch"]),
        (
            {"RINGJAX_FABRIC_LIBRARY": "/nonexistent/libfabric.so.1"},
            ["rank 1 on host1", "/nonexistent/libfabric.so.1", "install libfabric"],
        ),
        (
            {"RINGJAX_FABRIC": "off"},
            ["RINGJAX_FABRIC must be alike", "'off' on rank 1"],
        ),
        (
            {"RINGJAX_FABRIC": "tcp;ofi_rxm"},
            ["RINGJAX_FABRIC must be alike", "'tcp;ofi_rxm' on rank 1"],
        ),
    ],
    ids=["no provider", "no library", "off", "another"],
)
def test_a_rank_with_another_fabric_fails_at_the_start(
    start_job: StartJob, rank_1: dict[str, str], texts: list[str]
) -> None:
    script = HEAD + f"if rank == 1:\n    os.environ |= {rank_1!r}\n" + INIT
    job = start_job(3, script, env=fabric_env())
    assert job.wait(50) != 0, job.logs()
    for text in texts:
        assert text in job.output(1), job.logs()
        assert text in job.launcher_output(), job.logs()


def test_libfabric_uses_the_chosen_interface(start_job: StartJob) -> None:
    script = """
from dataclasses import replace
from ringjax.config import Config
from ringjax.links import fabric

# By itself, libfabric takes a loopback interface last.
chosen = fabric.find(replace(Config.from_env(), network_interfaces="lo"), "rank 0")
assert chosen.domain == "lo", chosen
"""
    job = start_job(1, script, env=fabric_env())
    assert job.wait(50) == 0, job.logs()
