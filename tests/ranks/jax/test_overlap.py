"""Overlapped gradients in bounded memory: results, resident memory, and failures.

Each job sets RINGJAX_OVERLAP_MEMORY so low that buckets wait for others or are reduced
in place. The expected results come from the in-place mode, on numbers with exact sums.
"""

from __future__ import annotations

import signal
from textwrap import dedent

import pytest
from support.launch import Job, StartJob

pytestmark = pytest.mark.timeout(150)
KIB, MIB = 1 << 10, 1 << 20

HEAD = '''
import gc, sys, time
import jax, jax.numpy as jnp, numpy as np
import ringjax

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()

def report(error):
    sys.stdout.write(f"caught: {error}\\n")
    sys.stdout.flush()

def training(change):
    # Each gradient depends on the one before, so they become ready one by one.
    @jax.jit
    def step(params, state):
        x, grads = jnp.float32(rank), []
        for p in params:
            grads.append(jnp.round(p + x % 5))
            x = x + jnp.sum(grads[-1][:1])
        return change.update(grads, state)
    return step

def params(sizes):
    # NumPy, because jnp would compile a program for every size.
    arrays = [np.arange(n // 4, dtype=np.float32) % 7 for n in sizes]
    return jax.device_put(arrays)

def resident(enough=0, seconds=2):
    """Returns the least resident memory within `seconds`; stops at `enough` bytes.

    XLA frees the memory of a step some time after its results are ready.
    """
    gc.collect()
    least, end = 2**60, time.monotonic() + seconds
    while least > enough and time.monotonic() < end:
        with open("/proc/self/status") as status:
            found = dict(line.split(":") for line in status if line.startswith("Rss"))
        kinds = (found[kind] for kind in ("RssAnon", "RssShmem"))
        least = min(least, sum(int(kind.split()[0]) << 10 for kind in kinds))
        time.sleep(0.05)
    return least
'''


def run(start_job: StartJob, np: int, memory: int, script: str) -> Job:
    env = {
        "RINGJAX_OVERLAP_MEMORY": str(memory),
        "NPROC": "4",  # threads of XLA: with one, small programs run in order
        # malloc returns freed blocks of at least this size to the system, so the
        # resident memory is the memory in use.
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536",
    }
    return start_job(np, HEAD + dedent(script), env=env)


@pytest.mark.parametrize(("np", "memory"), [(2, 0), (3, 40 * KIB)])
def test_overlap_computes_the_same_results(
    start_job: StartJob, np: int, memory: int
) -> None:
    script = """
    sizes = [4 << 10, 36 << 10, 8, 4, 20 << 10, 100 << 10, 16 << 10, 40 << 10, 0, 12]
    grads = params(sizes)
    change = [ringjax.allreduce_grads(ringjax.Sum, overlap=o, bucket_bytes=1 << 10)
              for o in (False, True)]
    steps = [training(c) for c in change]
    states = [c.init(grads) for c in change]
    for number in range(20):
        wanted, states[0] = steps[0](grads, states[0])
        got, states[1] = steps[1](grads, states[1])
        for a, b in zip(wanted, got):
            np.testing.assert_array_equal(a, b)
        grads = jax.device_put([np.asarray(g) % 11 + number for g in got])
    assert [int(s.seq[0]) for s in states] == [20, 20]
    """
    job = run(start_job, np, memory, script)
    assert job.wait(140) == 0, job.logs()


def test_memory_is_bounded_and_does_not_grow(start_job: StartJob) -> None:
    """At most 16 MiB of the 160 MiB of gradients may be in flight."""
    script = """
    MIB = 1 << 20
    change = [ringjax.allreduce_grads(overlap=o) for o in (False, True)]
    large = params([4 * MIB] * 35 + [20 * MIB])
    states, steps = [c.init(large) for c in change], [training(c) for c in change]

    def run(which, count):
        for _ in range(count):
            got, states[which] = steps[which](large, states[which])
            jax.block_until_ready(got)

    for step, state in zip(steps, states):
        step.lower(large, state).compile()  # compilation leaves garbage of JAX
    run(0, 2)
    in_place = resident()
    for _ in range(3):
        run(1, 1)
        extra = resident(in_place + 20 * MIB, seconds=10) - in_place
        assert 8 * MIB < extra < (16 + 4) * MIB, extra / MIB

    large = params([256 << 10, 64 << 10, 4])
    run(1, 50)
    before = resident()
    run(1, 300)
    growth = resident(before + 2 * MIB, seconds=10) - before
    assert growth < 2 * MIB, growth / MIB
    """
    job = run(start_job, 2, 16 * MIB, script)
    assert job.wait(140) == 0, job.logs()


KILLED = """
grads = params([64 << 10] * 30)
change = ringjax.allreduce_grads(overlap=True, bucket_bytes=1)
step, state = training(change), change.init(grads)
try:
    for number in range(10**9):
        _, state = jax.block_until_ready(step(grads, state))
        if number == 5:
            print("training", flush=True)
except Exception as error:
    report(error)
    raise
"""


def test_a_rank_killed_within_the_window_is_named(start_job: StartJob) -> None:
    job = run(start_job, 3, 128 * KIB, KILLED)
    for rank in range(3):
        job.wait_for(rank, "training")
    job.kill(rank=1)
    assert job.wait(100) == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2):
        caught = job.output(rank).partition("caught: ")[2]
        assert "rank 1" in caught, job.logs()


@pytest.mark.parametrize("memory", [64 * MIB, 64 * KIB, 0])
def test_a_step_that_fails_within_the_window_fails_on_all_ranks(
    start_job: StartJob, memory: int
) -> None:
    """A callback fails between START and DONE, so later steps of its rank must fail."""
    script = """
    change = ringjax.allreduce_grads(overlap=True, bucket_bytes=1)

    def fetch(x):
        fetch.calls += 1
        if rank == 1 and fetch.calls == 4:
            time.sleep(0.5)  # the other rank has started its buckets by now
            raise ValueError("the disk is gone")
        return np.asarray(x)

    fetch.calls = 0

    @jax.jit
    def step(grads, state, x):
        between = []  # returned, because XLA would reuse memory and order the work
        for _ in range(6):
            x = jnp.tanh(x @ x)
            between.append(x)
        grads = [g * 2 for g in grads]
        shape = jax.ShapeDtypeStruct((8192,), x.dtype)
        late = jax.pure_callback(fetch, shape, x.reshape(-1)[:8192])
        return change.update([late, *grads], state), between

    grads = params([32 << 10] * 3)
    state = change.init(grads)
    x = jnp.full((256, 256), 0.01)
    for number in range(10):
        try:
            (_, state), _ = jax.block_until_ready(step(grads, state, x))
        except Exception as error:
            report(f"in {number}: {error}".replace(chr(10), " "))
            if "the disk is gone" not in str(error):
                break
    else:
        raise SystemExit("no step raised the error of the job")
    """
    job = run(start_job, 2, memory, script)
    assert job.wait(140) == 0, job.logs()
    output = job.output(1)
    assert "caught: in 3: " in output and "the disk is gone" in output, job.logs()
    for rank in range(2):
        assert "RINGJAX[world, epoch 0]" in job.output(rank), job.logs()
        assert "rank 1" in job.output(rank), job.logs()
