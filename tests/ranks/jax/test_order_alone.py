"""Stand-alone collectives keep their order in inner functions, and between programs.

Within a program, a token of JAX passes through all functions. Between programs on one
CPU device there is no token, because XLA runs the programs of a thread in the order of
their calls. As in test_order.py, the towers of the ranks have different heights, and
controls without these mechanisms must fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.stacked import equal

import ringjax
from ringjax.xla import call_order, tokens

JAX: Any = tokens  # imports private names of JAX, which no other file may import

pytestmark = pytest.mark.launch("collectives")
STEPS = 15
ONE_WORKER = {"NPROC": "1"}
WORKERS = {"NPROC": "4"}
# The type of the error depends on how the program was called
# (docs/operate/sharp-bits.md).
ERRORS = (jax.errors.JaxRuntimeError, ValueError)
DISAGREE = r"(?s)RINGJAX\[.*(ranks disagree|has not called)"


def tower(x: Any, height: int) -> Any:
    for _ in range(height):
        x = jnp.tanh(x @ x.T / 8)
    return x


def alone(x: Any, name: str) -> Any:
    return ringjax.allreduce(x, name=name)


def plain(x: Any, name: str) -> Any:
    return alone(x, name)


def in_jit(x: Any, name: str) -> Any:
    return jax.jit(lambda x: alone(x, name))(x)


def in_two_jits(x: Any, name: str) -> Any:
    return jax.jit(lambda x: in_jit(x, name) + in_jit(x * 2, name + "'"))(x)


def in_cond(x: Any, name: str) -> Any:
    return jax.lax.cond(x[0, 0] > -2, lambda x: alone(x, name), lambda x: x, x)


def in_scan(x: Any, name: str) -> Any:
    step = lambda x, _: (alone(x, name), None)  # noqa: E731
    return jax.lax.scan(step, x, None, length=2)[0]


def in_while(x: Any, name: str) -> Any:
    return jax.lax.fori_loop(0, x.shape[0] % 3 + 1, lambda _, x: in_jit(x, name), x)


def in_remat(x: Any, name: str) -> Any:
    again = jax.checkpoint(lambda x: in_jit(x, name) ** 2)
    return jax.grad(lambda x: again(x).sum())(x)


def in_grad(x: Any, name: str) -> Any:
    return jax.grad(lambda x: (in_jit(x, name) ** 2).sum())(x)


def in_vmap(x: Any, name: str) -> Any:
    return jax.vmap(lambda x: in_jit(x, name))(x)


KINDS: tuple[Callable[[Any, str], Any], ...] = (
    in_jit, plain, in_cond, in_jit, in_scan, in_two_jits, in_while, in_remat, in_jit,
    in_grad, in_vmap, plain,
)  # fmt: skip


def start() -> list[Any]:
    # All calls have different sizes, so that two different calls are a mismatch.
    return [jnp.full((64 + 8 * k,) * 2, 0.01 * (k + 1)) for k in range(len(KINDS))]


def run(rank: int) -> list[Any]:
    @jax.jit
    def step(xs: list[Any]) -> Any:
        heights = [1 + (k if rank else len(xs) - k) % 5 for k in range(len(xs))]
        between = [tower(x, h) for x, h in zip(xs, heights, strict=True)]
        named = enumerate(zip(KINDS, between, strict=True))
        return [f(x, f"{f.__name__} {k}") for k, (f, x) in named], between

    xs = start()
    for _ in range(STEPS):
        ys, between = step(xs)
        # The next input is bounded and does not depend on the collectives.
        xs = [jnp.clip(x, 0.01, 0.1) for x in between]
        jax.block_until_ready(ys)
    return ys


@contextlib.contextmanager
def without_order() -> Iterator[None]:
    """Lowers every call with a new token, so that nothing orders the calls."""
    with pytest.MonkeyPatch.context() as patch, call_order.unordered():
        token_set = JAX._mlir.TokenSet
        patch.setattr(token_set, "get", lambda *_: JAX._mlir.create_token())
        yield


@pytest.mark.ranks(2, env=ONE_WORKER)
def test_calls_in_inner_functions_with_one_worker(world) -> None:
    check_equal_on_all_ranks(run(world.rank))


@pytest.mark.ranks(2, env=WORKERS)
def test_calls_in_inner_functions_with_many_workers(world) -> None:
    check_equal_on_all_ranks(run(world.rank))


def check_equal_on_all_ranks(ys: list[Any]) -> None:
    for y in ys:
        assert np.isfinite(y).all()
        equal(ringjax.allreduce(y, ringjax.Max), y)
        equal(ringjax.allreduce(y, ringjax.Min), y)


@pytest.mark.ranks(2, isolated=True, env={**WORKERS, "RINGJAX_COLLECTIVE_TIMEOUT": "5"})
def test_control_without_tokens_disagrees(world) -> None:
    """If this raises no error, the tests above prove nothing."""
    with without_order(), pytest.raises(ERRORS, match=DISAGREE):
        run(world.rank)


class Programs:
    """Independent programs of all kinds, fast on one rank and slow on the other."""

    def __init__(self, rank: int) -> None:
        tx = ringjax.allreduce_grads()
        self.state = tx.init(jnp.ones(20))
        chain = jax.jit(tx.update)
        small = jax.jit(lambda x: alone(x, "small"))
        dropped = jax.jit(lambda x: (alone(x, "unused"), x)[1])
        ahead = jax.jit(lambda x: alone(x, "ahead")).lower(jnp.ones(13)).compile()
        barrier = jax.jit(lambda: ringjax.barrier(name="barrier"))

        def slow(size: int, height: int) -> Callable[[], Any]:
            program = jax.jit(lambda x: alone(tower(x, height), f"slow {size}"))
            x = jnp.full((size, size), 0.01)
            return lambda: program(x)

        def gradients() -> Any:
            out, self.state = chain(jnp.ones(20), self.state)
            return out

        self.calls: list[Callable[[], Any]] = [
            slow(192, 1 + 9 * (1 - rank)),
            lambda: small(jnp.ones(11)),
            lambda: dropped(jnp.ones(12)),
            lambda: ahead(jnp.ones(13)),
            slow(160, 1 + 9 * rank),
            lambda: ringjax.allreduce(jnp.ones(14), name="eager"),
            barrier,
            gradients,
        ]


@pytest.mark.ranks(2, env=WORKERS)
def test_programs_run_in_the_order_of_their_calls(world) -> None:
    programs, kept = Programs(world.rank), None
    order = np.random.default_rng(7)
    for _ in range(300):  # many programs are in flight; most results are dropped
        kept = programs.calls[order.integers(len(programs.calls))]()
    jax.block_until_ready(kept)
    tokens.wait_for_programs()
    equal(ringjax.allreduce(jnp.float32(world.rank), ringjax.Sum), np.float32(1))


@pytest.mark.ranks(2, isolated=True, env={**WORKERS, "RINGJAX_COLLECTIVE_TIMEOUT": "5"})
def test_control_programs_of_two_threads_disagree(world) -> None:
    """If this raises no error, the test above proves nothing."""
    height = 1 if world.rank else 12
    slow = jax.jit(lambda x: alone(tower(x, height), "slow"))
    small = jax.jit(lambda x: alone(x, "small"))
    x, y = jnp.full((512, 512), 0.01), jnp.ones(11)
    jax.block_until_ready([slow(x), small(y)])

    def call() -> Any:
        return jax.block_until_ready(slow(x)) if world.rank else slow(x)

    with ThreadPoolExecutor(1) as other, pytest.raises(ERRORS, match=DISAGREE):
        for _ in range(STEPS):
            result = other.submit(call).result()
            jax.block_until_ready([small(y), result])


@pytest.mark.ranks(2)
def test_an_error_outside_of_jit_is_always_a_jax_runtime_error(world) -> None:
    """JAX itself would raise ValueError if it calls the failing program from C++."""
    rows = [jnp.ones(3), jnp.ones(4)]
    for _ in range(2):  # JAX makes the first call of a program from Python
        for x in rows:
            jax.block_until_ready(alone(x, "rows"))
        with pytest.raises(jax.errors.JaxRuntimeError, match=DISAGREE):
            jax.block_until_ready(alone(rows[world.rank], "rows"))


EXIT = """
import time
import jax, jax.numpy as jnp, numpy as np, ringjax
ringjax.init()
step = jax.jit(lambda x: ringjax.allreduce(jnp.tanh(x @ x.T)))
if ringjax.rank() == 0:
    step(jnp.ones((256, 256)))  # the result is dropped at once
else:
    time.sleep(0.5)  # rank 0 reaches its exit long before
    assert np.isfinite(np.asarray(step(jnp.ones((256, 256))))).all()
"""


def test_exit_waits_for_unreferenced_results(start_job) -> None:
    job = start_job(2, EXIT)
    assert job.wait(50) == 0, job.logs()
