"""Stories with real processes: ranks that die, raise, leave, freeze, stall or disagree.

What every other rank must see: an error that names the culprit, soon; and of the job:
the culprit's exit code, its reason last, and nothing left behind.
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

TELL = """
# Where tests run in the background of a shell, Ctrl-C is ignored and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
# ringrun asks all to end a second after a loss; a busy one may be about to tell of it.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def tell(error):
    sys.stdout.write(f"caught at {time.monotonic()}: {error}\\n")
    sys.stdout.flush()
"""

# Tests that are not about XLA need no jax: numpy_only calls as a program does.
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
    + TELL
)

# Tests with these names are about XLA: its handling of errors and signals.
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
    + TELL
)

TRAIN = """
train(10)
print("training", flush=True)
"""

TRAIN_ON = (
    TRAIN
    + """
try:
    train(10**9)
except Exception as error:
    tell(error)
    raise
"""
)

WAIT = """
loss()  # compiled, if it is: the next one is in the core within a moment
print("ready", flush=True)
try:
    if rank == 0:
        time.sleep(600)
    loss()
except BaseException as error:
    tell(repr(error))
    raise
"""

# The timeout for silent ranks is longer than a test.
PATIENT = {"RINGJAX_FAILURE_TIMEOUT": "600", "RINGJAX_COLLECTIVE_TIMEOUT": "600"}


class Watch:
    """Two seconds on an idle machine, and as many more as a job takes to start here."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._now = self._limit = 0.0

    def press(self, now: float = 0.0) -> None:
        """Starts the measurement. The time so far, a job's start, sets the limit."""
        self._now = now or time.monotonic()
        self._limit = 2 + 2 * (self._now - self._begin)

    def runs(self, when: float = 0.0) -> bool:
        """Whether the limit had not passed at `when`, by default now."""
        return (when or time.monotonic()) - self._now < self._limit


@pytest.fixture
def watch() -> Watch:
    return Watch()


def _caught(job: Job, rank: int) -> tuple[float, str]:
    """The time at which a rank caught its error, and the error's text."""
    assert "caught at " in job.output(rank), job.logs()
    when, _, text = job.output(rank).partition("caught at ")[2].partition(": ")
    return float(when), text


def _all_print(job: Job, text: str) -> None:
    for rank in range(job.np):
        job.wait_for(rank, text)


def test_a_killed_rank_is_named_by_the_others_within_two_seconds(
    watch: Watch, start_job: StartJob
) -> None:
    job = start_job(3, HEAD + TRAIN_ON, env=PATIENT)
    _all_print(job, "training")
    watch.press()
    job.kill(rank=1)
    assert job.wait(40) == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2):
        when, text = _caught(job, rank)
        assert watch.runs(when), job.logs()
        assert "rank 1" in text
    assert "rank 1" in job.launcher_output().splitlines()[-1]


@pytest.mark.parametrize("way", ["core", "compiled"])
def test_an_exception_reaches_every_rank_with_its_text(
    watch: Watch, start_job: StartJob, way: str
) -> None:
    script = """
    try:
        if rank == 1:
            raise ValueError("the data set is gone")
        train(10**9)
    except Exception as error:
        tell(error)
        raise
    """
    head = {"core": HEAD, "compiled": COMPILED}[way]
    job = start_job(3 if way == "core" else 2, head + TRAIN + dedent(script), PATIENT)
    assert job.wait(40) == 1, job.logs()
    watch.press(_caught(job, 1)[0])
    for rank in {*range(job.np)} - {1}:
        when, text = _caught(job, rank)
        assert watch.runs(when), job.logs()
        assert "rank 1" in text
        assert "ValueError: the data set is gone" in text
    last = job.launcher_output().splitlines()[-1]
    assert "rank 1" in last
    assert "the data set is gone" in last


def test_a_killed_rank_is_a_peer_lost_around_a_compiled_step(
    start_job: StartJob,
) -> None:
    """JAX calls it a ValueError or a JaxRuntimeError, as the step was called."""
    script = """
    try:
        with ringjax.errors.translated():
            train(10**9)
    except ringjax.errors.PeerLost as error:
        tell(f"{error.rank} {error.op} {error.tensor} because of {error.__cause__!r}")

    @ringjax.errors.translated()
    def plain():
        return float(ringjax.allreduce(1.0, name="loss"))

    try:
        plain()
    except ringjax.errors.PeerLost as error:
        print("then", error.rank, error.op, error.tensor, flush=True)
    """
    job = start_job(2, COMPILED + TRAIN + dedent(script), env=PATIENT)
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
        tell(error)
    """
    job = start_job(3, HEAD + TRAIN + dedent(script), env=PATIENT)
    assert job.wait(40) == 0, job.logs()  # the others survived it
    for rank in (0, 2):
        _, text = _caught(job, rank)
        assert "rank 1 has shut down before this call" in text
        assert "have all ranks equally many batches?" in text


def test_a_frozen_rank_is_named_after_the_failure_timeout(start_job: StartJob) -> None:
    patience = {"RINGJAX_FAILURE_TIMEOUT": "4", "RINGJAX_HEARTBEAT": "0.2"}
    job = start_job(3, HEAD + TRAIN_ON, env={**PATIENT, **patience})
    _all_print(job, "training")
    job.kill(rank=2, sig=signal.SIGSTOP)
    assert job.wait(40) != 0, job.logs()
    for rank in (0, 1):
        assert "rank 2" in _caught(job, rank)[1]


def test_a_rank_that_never_calls_is_named_after_the_deadline(
    start_job: StartJob,
) -> None:
    limit = {"RINGJAX_COLLECTIVE_TIMEOUT": "3"}
    job = start_job(3, HEAD + WAIT, env={**PATIENT, **limit})
    assert job.wait(40) != 0, job.logs()
    for rank in (1, 2):
        _, text = _caught(job, rank)
        assert "rank 0" in text, job.logs()
        assert "loss" in text


def test_ctrl_c_ends_a_waiting_job_within_two_seconds(
    watch: Watch, start_job: StartJob
) -> None:
    job = start_job(3, HEAD + WAIT, env=PATIENT)
    _all_print(job, "ready")
    time.sleep(0.3)  # lets the others enter the collective, mostly
    watch.press()
    job.interrupt()
    assert job.wait(40) == 128 + signal.SIGINT, job.logs()
    assert watch.runs()
    assert leaks.settle(lambda: list(leaks.processes(job.id).values())) == []
    # No rank had to be killed. SIGINT may interrupt a rank that already reports a lost
    # peer: then the words are in the source line of its traceback.
    outputs = [job.output(rank) for rank in range(3)]
    assert all("caught at " in output for output in outputs), job.logs()
    assert any("KeyboardInterrupt" in output for output in outputs), job.logs()


def test_a_rank_that_waits_in_a_program_of_xla_can_be_interrupted(
    watch: Watch, start_job: StartJob
) -> None:
    job = start_job(2, COMPILED + WAIT, env=PATIENT)
    _all_print(job, "ready")
    time.sleep(0.3)  # lets rank 1 enter the collective, mostly
    watch.press()
    job.kill(rank=1, sig=signal.SIGINT)
    job.wait_for(1, "caught at ")
    when, text = _caught(job, 1)
    assert watch.runs(when)
    assert "KeyboardInterrupt" in text


# name -> words of the error, and rank 1's arguments; other ranks reduce f32[4] by Sum
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
    """The next collectives work, and show that all ranks had the same text."""
    number = np.array([zlib.crc32(text.encode())], np.uint32)
    every = np.asarray(ringjax.allgather(number))
    assert every.tolist() == number.tolist() * world.size


@pytest.mark.parametrize("elastic", [False, True])
def test_a_full_disk_behind_stderr_ends_nothing(
    start_job: StartJob, elastic: bool
) -> None:
    """Strangers connect, which is logged. A lost log must not disturb the job."""
    script = """
import os, socket
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
import numpy as np
import ringjax
from ringjax import eager, runtime

ringjax.init()
door = runtime.current("test")._listener.unix_name
for _ in range(3):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\\0" + door)
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
