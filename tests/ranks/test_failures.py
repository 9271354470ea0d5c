"""Jobs in which a rank is killed, raises, leaves, freezes, stalls or disagrees.

Every other rank must soon raise an error that names the faulty rank. ringrun must exit
with the code of that rank, print its reason last, and leave no process behind.
"""

from __future__ import annotations

import signal
import time
import zlib
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import leaks
from support.launch import Job, StartJob
from support.rank_worker import World

import ringjax

pytestmark = pytest.mark.launch("collectives")

REPORT_ERROR = """
# If the tests run in the background of a shell, SIGINT is ignored, also in processes
# that they start. So set the handler of Python.
signal.signal(signal.SIGINT, signal.default_int_handler)
# ringrun sends SIGTERM a second after a loss. On a busy machine a rank may not have
# printed its error by then.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def report(error):
    sys.stdout.write(f"caught at {time.monotonic()}: {error}\\n")
    sys.stdout.flush()
"""

# Tests that are not about XLA do not import jax, which is slow. numpy_only makes the
# calls of a compiled program.
HEAD = (
    """
import os, signal, sys, time
import numpy as np
import ringjax
from support.numpy_only import allreduce

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()

def train(steps):
    for _ in range(steps):
        allreduce(np.full(4160, rank + 1.0, "f4"), "Average", name="grads")

def loss():
    allreduce(np.ones(4, "f4"), name="loss")
"""
    + REPORT_ERROR
)

# For tests about the way in which XLA handles errors and signals.
COMPILED = (
    """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import ringjax

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()
tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))
params = {"w": np.ones((64, 64), "f4"), "b": np.zeros(64, "f4")}
state = tx.init(params)

@jax.jit
def step(params, state, x):
    grads = jax.grad(lambda p: jnp.sum((x @ p["w"] + p["b"]) ** 2) / x.size)(params)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state

def train(steps):
    global params, state
    for _ in range(steps):
        params, state = step(params, state, np.full((8, 64), rank + 1.0, "f4"))
        jax.block_until_ready(params)

def loss():
    jax.block_until_ready(ringjax.allreduce(jnp.ones(4), name="loss"))
"""
    + REPORT_ERROR
)

TRAIN = """
train(10)
print("training", flush=True)
"""

TRAIN_FOREVER = (
    TRAIN
    + """
try:
    train(10**9)
except Exception as error:
    report(error)
    raise
"""
)

WAIT = """
loss()  # compiles the function, so the next call reaches the core at once
print("ready", flush=True)
try:
    if rank == 0:
        time.sleep(600)
    loss()
except BaseException as error:
    report(repr(error))
    raise
"""

# Longer than a test, so that no timeout can be the cause of an error.
NO_TIMEOUTS = {"RINGJAX_FAILURE_TIMEOUT": "600", "RINGJAX_COLLECTIVE_TIMEOUT": "600"}


class Stopwatch:
    """Measures whether something happens within 2 s and twice the start of the job.

    The time from the creation of the stopwatch to `start` is taken as the time in which
    the job starts. So the limit grows on a busy machine.
    """

    def __init__(self) -> None:
        self._created = time.monotonic()
        self._started = self._limit = 0.0

    def start(self, now: float = 0.0) -> None:
        """Starts the measurement at `now`, by default the current time."""
        self._started = now or time.monotonic()
        self._limit = 2 + 2 * (self._started - self._created)

    def in_time(self, when: float = 0.0) -> bool:
        """Whether `when`, by default the current time, is within the limit."""
        return (when or time.monotonic()) - self._started < self._limit


@pytest.fixture
def stopwatch() -> Stopwatch:
    return Stopwatch()


def _caught(job: Job, rank: int) -> tuple[float, str]:
    """Returns the time at which a rank caught its error, and the text of the error."""
    assert "caught at " in job.output(rank), job.logs()
    when, _, text = job.output(rank).partition("caught at ")[2].partition(": ")
    return float(when), text


def _all_print(job: Job, text: str) -> None:
    for rank in range(job.np):
        job.wait_for(rank, text)


def test_a_killed_rank_is_named_by_the_others_within_two_seconds(
    stopwatch: Stopwatch, start_job: StartJob
) -> None:
    job = start_job(3, HEAD + TRAIN_FOREVER, env=NO_TIMEOUTS)
    _all_print(job, "training")
    stopwatch.start()
    job.kill(rank=1)
    assert job.wait(40) == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2):
        when, text = _caught(job, rank)
        assert stopwatch.in_time(when), job.logs()
        assert "rank 1" in text
    assert "rank 1" in job.launcher_output().splitlines()[-1]


@pytest.mark.parametrize("program", ["core", "compiled"])
def test_an_exception_reaches_every_rank_with_its_text(
    stopwatch: Stopwatch, start_job: StartJob, program: str
) -> None:
    script = """
    try:
        if rank == 1:
            raise ValueError("the data set is gone")
        train(10**9)
    except Exception as error:
        report(error)
        raise
    """
    head = {"core": HEAD, "compiled": COMPILED}[program]
    np = 3 if program == "core" else 2
    job = start_job(np, head + TRAIN + dedent(script), NO_TIMEOUTS)
    assert job.wait(40) == 1, job.logs()
    stopwatch.start(_caught(job, 1)[0])
    for rank in {*range(job.np)} - {1}:
        when, text = _caught(job, rank)
        assert stopwatch.in_time(when), job.logs()
        assert "rank 1" in text
        assert "ValueError: the data set is gone" in text
    last = job.launcher_output().splitlines()[-1]
    assert "rank 1" in last
    assert "the data set is gone" in last


def test_a_killed_rank_is_a_peer_lost_around_a_compiled_step(
    start_job: StartJob,
) -> None:
    """JAX raises ValueError or JaxRuntimeError; `errors.translated` raises PeerLost."""
    script = """
    try:
        with ringjax.errors.translated():
            train(10**9)
    except ringjax.errors.PeerLost as error:
        report(f"{error.rank} {error.op} {error.tensor} because of {error.__cause__!r}")

    @ringjax.errors.translated()
    def plain():
        return float(ringjax.allreduce(1.0, name="loss"))

    try:
        plain()
    except ringjax.errors.PeerLost as error:
        print("then", error.rank, error.op, error.tensor, flush=True)
    """
    job = start_job(2, COMPILED + TRAIN + dedent(script), env=NO_TIMEOUTS)
    _all_print(job, "training")
    job.kill(rank=1)
    job.wait(40)
    _, text = _caught(job, 0)
    assert text.startswith("1 allreduce grads because of "), job.logs()
    assert "UNAVAILABLE" in text
    assert "then 1 allreduce loss" in job.output(0), job.logs()


def test_a_rank_that_leaves_early_is_named(start_job: StartJob) -> None:
    script = """
    if rank == 1:
        sys.exit(0)
    try:
        train(10**9)
    except Exception as error:
        report(error)
    """
    job = start_job(3, HEAD + TRAIN + dedent(script), env=NO_TIMEOUTS)
    assert job.wait(40) == 0, job.logs()  # the others catch the error and end
    for rank in (0, 2):
        _, text = _caught(job, rank)
        assert "rank 1 has shut down before this call" in text
        assert "have all ranks equally many batches?" in text


def test_a_frozen_rank_is_named_after_the_failure_timeout(start_job: StartJob) -> None:
    timeouts = {"RINGJAX_FAILURE_TIMEOUT": "4", "RINGJAX_HEARTBEAT": "0.2"}
    job = start_job(3, HEAD + TRAIN_FOREVER, env={**NO_TIMEOUTS, **timeouts})
    _all_print(job, "training")
    job.kill(rank=2, sig=signal.SIGSTOP)
    assert job.wait(40) != 0, job.logs()
    for rank in (0, 1):
        assert "rank 2" in _caught(job, rank)[1]


def test_a_rank_that_never_calls_is_named_after_the_deadline(
    start_job: StartJob,
) -> None:
    limit = {"RINGJAX_COLLECTIVE_TIMEOUT": "3"}
    job = start_job(3, HEAD + WAIT, env={**NO_TIMEOUTS, **limit})
    assert job.wait(40) != 0, job.logs()
    for rank in (1, 2):
        _, text = _caught(job, rank)
        assert "rank 0" in text, job.logs()
        assert "loss" in text


def test_ctrl_c_ends_a_waiting_job_within_two_seconds(
    stopwatch: Stopwatch, start_job: StartJob
) -> None:
    job = start_job(3, HEAD + WAIT, env=NO_TIMEOUTS)
    _all_print(job, "ready")
    time.sleep(0.3)  # the others are probably in the collective now
    stopwatch.start()
    job.interrupt()
    assert job.wait(40) == 128 + signal.SIGINT, job.logs()
    assert stopwatch.in_time()
    assert leaks.settle(lambda: list(leaks.processes(job.id).values())) == []
    # All ranks ended by an exception, so ringrun killed none. SIGINT may interrupt a
    # rank that already reports a lost peer; then "caught at " is in the source line
    # that its traceback prints.
    outputs = [job.output(rank) for rank in range(3)]
    assert all("caught at " in output for output in outputs), job.logs()
    assert any("KeyboardInterrupt" in output for output in outputs), job.logs()


def test_a_rank_that_waits_in_a_program_of_xla_can_be_interrupted(
    stopwatch: Stopwatch, start_job: StartJob
) -> None:
    job = start_job(2, COMPILED + WAIT, env=NO_TIMEOUTS)
    _all_print(job, "ready")
    time.sleep(0.3)  # rank 1 is probably in the collective now
    stopwatch.start()
    job.kill(rank=1, sig=signal.SIGINT)
    job.wait_for(1, "caught at ")
    when, text = _caught(job, 1)
    assert stopwatch.in_time(when)
    assert "KeyboardInterrupt" in text


# For each disagreement, parts of the error, and a function that returns the arguments
# of rank 1. The other ranks reduce f32[4] with Sum.
DISAGREEMENTS: dict[str, tuple[list[str], Callable[[Any], dict[str, Any]]]] = {
    "shape": (["f32[4]", "f32[3]"], lambda x: {"tensor": x[:3]}),
    "rank": (["f32[4]", "f32[2,2]"], lambda x: {"tensor": x.reshape(2, 2)}),
    "dtype": (["f32[4]", "i32[4]"], lambda x: {"tensor": x.astype(jnp.int32)}),
    "op": (["SUM", "MAX"], lambda x: {"tensor": x, "op": ringjax.Max}),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_every_rank_gets_one_clear_error_when_ranks_disagree(
    world: World, what: str
) -> None:
    shown, otherwise = DISAGREEMENTS[what]
    x = jnp.arange(4, dtype=jnp.float32)
    given = {"tensor": x, "op": ringjax.Sum, "name": "grads/2"}
    given |= otherwise(x) if world.rank == 1 else {}
    text = _mismatch(lambda: ringjax.allreduce(**given))
    for part in ["allreduce", "grads/2", "rank 0", "rank 1", *shown]:
        assert part in text
    _still_usable(world, text)


@pytest.mark.ranks(2, 3)
def test_every_rank_gets_one_clear_error_when_roots_differ(world: World) -> None:
    root = 1 if world.rank == 1 else 0
    text = _mismatch(
        lambda: ringjax.broadcast(jnp.ones(3), root_rank=root, name="weights")
    )
    for part in ("broadcast", "weights", "root"):
        assert part in text
    _still_usable(world, text)


@pytest.mark.ranks(2, 3)
def test_every_rank_gets_one_clear_error_when_operations_differ(world: World) -> None:
    call = ringjax.allgather if world.rank == 1 else ringjax.allreduce
    text = _mismatch(lambda: call(jnp.ones(3), name="x"))
    assert "allreduce" in text
    assert "allgather" in text
    _still_usable(world, text)


def _mismatch(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception, match="RINGJAX") as caught:
        jax.block_until_ready(call())
    ours = ringjax.errors.translate(caught.value)
    assert type(ours) is ringjax.errors.Mismatch
    assert ours.op in ("allreduce", "allgather", "broadcast")
    assert ours.tensor and ours.tensor in str(ours)
    return str(caught.value)


def _still_usable(world: World, text: str) -> None:
    """Checks that the next collective works and that `text` is equal on all ranks."""
    number = np.array([zlib.crc32(text.encode())], np.uint32)
    every = np.asarray(ringjax.allgather(number))
    assert every.tolist() == number.tolist() * world.size


@pytest.mark.parametrize("elastic", [False, True])
def test_a_full_disk_behind_stderr_fails_no_rank(
    start_job: StartJob, elastic: bool
) -> None:
    """Unrelated programs connect, and ringjax logs it to a stderr that is full."""
    script = """
import os, socket
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
import numpy as np
import ringjax
from ringjax import eager, runtime

ringjax.init()
address = runtime.current("test")._listener.unix_name
for _ in range(3):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\\0" + address)
        stranger.sendall(b"x" * 4096)
        while True:
            try:
                if not stranger.recv(100):
                    break
            except ConnectionError:
                break
pair = ringjax.add_process_set([0, 1])
total = eager.allreduce(np.ones(3, "f4"), ringjax.Sum, process_set=pair)
assert (total == 2).all(), total
print("done", flush=True)
"""
    job = start_job(2, script, options=["--min-np", "2"] if elastic else [])
    assert job.wait() == 0, job.logs()
    assert all("done" in job.output(rank) for rank in range(2)), job.logs()
