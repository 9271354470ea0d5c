"""Stand-alone collectives keep their order in inner functions, and between programs.

A program on one CPU device takes no token from JAX: within it JAX's token goes through
all functions, and XLA runs what a thread calls in the order of the calls. As in
test_order.py the ranks' towers differ, so that work ends in another order on each; and
what would go wrong without that order is a control that must fail.
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

JAX: Any = tokens  # with the private names of jax, which only that file imports

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
    # Different sizes, so that a call that meets another one is noticed.
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
        # Something for the next step, bounded, that does not depend on the collective.
        xs = [jnp.clip(x, 0.01, 0.1) for x in between]
        jax.block_until_ready(ys)
    return ys


@contextlib.contextmanager
def without_order() -> Iterator[None]:
    """Lowers every call with a token of its own, as if it had a mere side effect."""
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
    """If this passes without an error, the tests above prove nothing."""
    with without_order(), pytest.raises(ERRORS, match=DISAGREE):
        run(world.rank)


class Programs:
    """Programs of all kinds that share no data, slow on one rank, quick on another."""

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
    for _ in range(300):  # not waited for, and most results dropped at once
        kept = programs.calls[order.integers(len(programs.calls))]()
    jax.block_until_ready(kept)
    tokens.wait_for_programs()
    equal(ringjax.allreduce(jnp.float32(world.rank), ringjax.Sum), np.float32(1))


@pytest.mark.ranks(2, isolated=True, env={**WORKERS, "RINGJAX_COLLECTIVE_TIMEOUT": "5"})
def test_control_programs_of_two_threads_disagree(world) -> None:
    """If this passes without an error, the test above proves nothing."""
    height = 1 if world.rank else 12
    slow = jax.jit(lambda x: alone(tower(x, height), "slow"))
    small = jax.jit(lambda x: alone(x, "small"))
    x, y = jnp.full((512, 512), 0.01), jnp.ones(11)
    jax.block_until_ready([slow(x), small(y)])

    def call() -> Any:
        return jax.block_until_ready(slow(x)) if world.rank else slow(x)

    with ThreadPoolExecutor(1) as other, pytest.raises(ERRORS, match=DISAGREE):
        for _ in range(STEPS):
            begun = other.submit(call).result()
            jax.block_until_ready([small(y), begun])


@pytest.mark.ranks(2)
def test_an_error_outside_of_jit_has_one_class(world) -> None:
    """JAX raises a ValueError where a program fails that it calls from C++."""
    rows = [jnp.ones(3), jnp.ones(4)]
    for _ in range(2):  # the first time, JAX calls from Python
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
    step(jnp.ones((256, 256)))  # nobody keeps what it returns
else:
    time.sleep(0.5)  # rank 0 is at its exit long before
    assert np.isfinite(np.asarray(step(jnp.ones((256, 256))))).all()
"""


def test_exit_waits_for_what_nobody_kept(start_job) -> None:
    job = start_job(2, EXIT)
    assert job.wait(50) == 0, job.logs()
