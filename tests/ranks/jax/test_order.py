"""Calls in a program run in one order on all ranks, because call_order.py ties them.

XLA runs small or sequential programs in order anyway. So the program has independent
branches, called towers, with a call in each, and a control without the ties must fail.
Tests with a single worker thread of XLA show that no call blocks the only thread while
another call must run. unit/test_lowering.py tests the lowered text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from support.stacked import equal, raises

import ringjax
from ringjax import runtime
from ringjax.xla import call_order
from ringjax.xla import gradient_allreduce as gradients

pytestmark = pytest.mark.launch("collectives")
TOWERS = 8
STEPS = 25
ONE_WORKER = {"NPROC": "1"}
WORKERS = {"NPROC": "4"}


def chained(leaf: Any, seq: Any, overlapped: bool, name: str) -> tuple[Any, Any]:
    (leaf,), seq = gradients.bucketed_allreduce(
        [leaf],
        seq,
        op=ringjax.Average,
        wire=-1,
        prescale=1.0,
        postscale=1.0,
        comm=runtime.communicator().id,
        timeout=runtime.global_process_set.limit(),
        cuts=((0,),),
        overlapped=overlapped,
        memory=runtime.config().overlap_memory,
        elastic_memory=None,
        name=name,
        names=("x",),
    )
    return leaf, seq


def tower(x: Any, depth: int) -> Any:
    for _ in range(depth):
        x = jnp.tanh(x @ x.T / 8)
    return x


def start(rank: int) -> tuple[list[Any], list[Any]]:
    # All calls have different sizes, so that two different calls are a mismatch.
    xs = [jnp.full((64 + 8 * k, 64 + 8 * k), 0.01 * (k + 1)) for k in range(TOWERS)]
    return xs, [jnp.zeros(1, jnp.uint32) for _ in xs]


def program(rank: int, overlapped: bool) -> Callable[..., Any]:
    """Returns a step with towers that end in a chained or in a stand-alone call.

    The step returns its intermediate values, because otherwise XLA reuses their memory
    and thereby orders the towers. The towers of the two ranks have different heights,
    so that they finish in different orders.
    """

    @jax.jit
    def step(xs: list[Any], seqs: list[Any]) -> Any:
        out, between = [], []
        for k, (x, seq) in enumerate(zip(xs, seqs, strict=True)):
            x = tower(x, 1 + (k if rank else TOWERS - k) % 5)
            between.append(x)
            if k % 4 == 3:
                x = ringjax.allreduce(x, name=f"alone {k}")
            else:
                x, seqs[k] = chained(x, seq, overlapped, f"chain {k}")
            out.append(x * 0.9)
        return out, seqs, between

    return step


def run(world: Any, overlapped: bool) -> list[Any]:
    step = program(world.rank, overlapped)
    xs, seqs = start(world.rank)
    for _ in range(STEPS):
        xs, seqs, _ = step(xs, seqs)
    jax.block_until_ready(xs)
    expected = [0 if k % 4 == 3 else STEPS for k in range(TOWERS)]
    assert [int(s[0]) for s in seqs] == expected
    return xs


def check_equal_on_all_ranks(xs: list[Any]) -> None:
    for x in xs:
        assert np.isfinite(x).all()
        equal(ringjax.allreduce(x, ringjax.Max), x)
        equal(ringjax.allreduce(x, ringjax.Min), x)


@pytest.mark.ranks(2, env=ONE_WORKER)
@pytest.mark.parametrize("overlapped", [False, True])
def test_calls_stay_in_order_with_one_worker_thread(world, overlapped) -> None:
    check_equal_on_all_ranks(run(world, overlapped))


@pytest.mark.ranks(2, env=WORKERS)
@pytest.mark.parametrize("overlapped", [False, True])
def test_calls_stay_in_order_with_many_worker_threads(world, overlapped) -> None:
    check_equal_on_all_ranks(run(world, overlapped))


@pytest.mark.ranks(2, isolated=True, env={**WORKERS, "RINGJAX_COLLECTIVE_TIMEOUT": "5"})
def test_control_without_the_order_disagrees(world) -> None:
    """If this raises no error, the tests above prove nothing.

    A worker thread may be in another call, which waits for a rank whose step has
    failed. The timeout ends that wait.
    """
    text = r"(?s)RINGJAX\[.*(ranks disagree|has not called)"
    with call_order.unordered(), pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(world, overlapped=False)


@pytest.mark.ranks(2)
def test_inner_jit_beside_a_call_never_hangs(world) -> None:
    """Ties do not reach into an inner jit, which docs/operate/sharp-bits.md describes.

    Either XLA keeps the order, or all ranks raise and later calls work.
    """
    inner = jax.jit(lambda x, seq: chained(tower(x, 3), seq, False, "inner"))

    @jax.jit
    def step(x: Any, y: Any, seq: Any) -> Any:
        x, seq = inner(x, seq)
        return x, ringjax.allreduce(tower(y, 4 if world.rank else 1)), seq

    x, y, seq = jnp.ones((96, 96)), jnp.ones((64, 64)), jnp.zeros(1, jnp.uint32)
    failed = False
    for _ in range(10):
        try:
            x, y, seq = jax.block_until_ready(step(x, y, seq))
        except jax.errors.JaxRuntimeError as error:
            assert "RINGJAX[" in str(error)
            failed = True
            break
    outcomes = ringjax.allgather(np.int32(failed))
    assert len(set(outcomes.tolist())) == 1


@pytest.mark.ranks(3)
def test_steps_in_flight_stay_in_order(world) -> None:
    """Chains order whole programs: each step takes the sequence number of the last."""

    @jax.jit
    def step(x, seq):
        x, seq = chained(x + world.rank, seq, True, "grads")
        return x, seq

    x, seq = jnp.zeros(1000), jnp.zeros(1, jnp.uint32)
    for _ in range(50):
        x, seq = step(x, seq)  # many steps are in flight at a time
    equal(seq, np.full(1, 50, np.uint32))
    equal(x, np.full(1000, 50 * (world.size - 1) / 2, np.float32), 1e-4)


EXIT = """
import time
import jax, numpy as np, ringjax
ringjax.init()
tx = ringjax.allreduce_grads()
grads = np.full(100_000, ringjax.rank(), "f4")
state = tx.init(grads)
step = jax.jit(tx.update)
for _ in range(20):
    grads, state = step(grads, state)
mean = jax.jit(lambda x: ringjax.allreduce(x))(grads)
if ringjax.rank() == 1:
    time.sleep(0.5)  # the others reach their exit long before
"""


def test_exit_waits_for_dispatched_steps(start_job) -> None:
    job = start_job(3, EXIT)
    assert job.wait(50) == 0, job.logs()
    for rank in range(3):
        assert "Error" not in job.output(rank), job.logs()


@pytest.mark.ranks(2)
def test_ranks_at_different_steps_raise(world) -> None:
    step = jax.jit(lambda x, seq: chained(x, seq, False, "grads"))
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "grads"):
        jax.block_until_ready(step(jnp.ones(3), jnp.full(1, world.rank, jnp.uint32)))
    equal(step(jnp.ones(3), jnp.zeros(1, jnp.uint32))[0], np.ones(3, np.float32))


@pytest.mark.ranks(1, 2, 3)
def test_debug_nans_rechecks_without_other_ranks(world) -> None:
    """With jax_debug_nans, only the rank with a NaN runs the program again."""
    last = world.size - 1

    @jax.jit
    def program(x, bad):
        total = ringjax.allreduce(x, ringjax.Sum, name="total")
        return total, jnp.log(jnp.where(bad, -1.0, 1.0))

    with jax.debug_nans(True):
        if world.rank == last:
            parts = ("in log",) if last == 0 else ("behind it", f"rank {last} sent")
            with raises(FloatingPointError, *parts):
                program(jnp.ones(3), True)
        else:
            program(jnp.ones(3), False)
            again = f"rank {last} sent allreduce 'total again, for jax_debug_nans'"
            # While JAX checks values for NaN, an error of the program is a ValueError.
            with raises(ValueError, again):
                jax.block_until_ready(program(jnp.ones(3), False))
        total, _ = program(jnp.ones(3), False)
    equal(total, np.full(3, world.size, np.float32))


@pytest.mark.ranks(1, 3)
def test_checkify_finds_a_nan_that_another_rank_has_sent(world) -> None:
    checked = checkify.checkify(
        lambda x: ringjax.allreduce(jnp.log(x)), errors=checkify.float_checks
    )
    for bad in (False, True):
        x = jnp.float32(-1.0 if bad and world.rank == world.size - 1 else 1.0)
        error, _ = jax.jit(checked)(x)
        assert (error.get() is not None) == bad
