"""The parameter check: if parameters differ, a warning names the leaf and the ranks."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.parameter_warnings import check_every

import ringjax
from ringjax.xla import lowering

EVERY = 3

pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("collectives")]
ALL = pytest.mark.ranks(1, 2, 3)
DIFFER = "warning: the ranks' parameters differ at optimizer step"


@pytest.fixture(autouse=True)
def equal_before(world, capfd, monkeypatch) -> None:
    """Checks equal parameters, which ends a difference that an earlier test left."""
    check_every(monkeypatch, EVERY)
    tx, ones = ringjax.allreduce_grads(), jnp.ones(1)
    jax.block_until_ready(tx.update(ones, tx.init(ones), ones))
    ringjax.barrier()
    capfd.readouterr()


class Training:
    """A training loop that returns the warnings of its steps, which rank 0 prints."""

    def __init__(
        self, world, capfd, *, jit=True, wrap=lambda tx: tx, **options
    ) -> None:
        self.tx = wrap(
            optax.chain(ringjax.allreduce_grads(**options), optax.sgd(0.25, 0.9))
        )
        self.params = {
            "a": jnp.arange(1000.0),
            "b": {"c": jnp.ones((3, 5)), "d": jnp.ones((2,), jnp.bfloat16)},
            "none": None,
        }
        self.state = self.tx.init(self.params)
        self.update = (
            jax.jit(self._update, donate_argnums=(0, 1)) if jit else self._update
        )
        self._capfd = capfd

    def _update(self, params, state):
        grads = jax.tree.map(lambda x: 0.1 * x, params)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(self, steps: int) -> list[str]:
        for _ in range(steps):
            self.params, self.state = self.update(self.params, self.state)
        jax.block_until_ready(self.params)
        ringjax.barrier()
        return self.warnings()

    def warnings(self) -> list[str]:
        lines = self._capfd.readouterr().err.splitlines()
        return [line for line in lines if DIFFER in line]

    def change(self, by: float) -> None:
        c = self.params["b"]["c"]
        self.params["b"]["c"] = c.at[2, 4].add(by)


def check(world, lines: list[str], step: int, leaf: str, rest: str) -> None:
    """Checks that only rank 0 has warned, and only once."""
    if world.rank > 0 or world.size == 1:
        assert lines == []
        return
    assert len(lines) == 1
    assert f"{DIFFER} {step}: '{leaf}' of {rest}" in lines[0]
    assert "broadcast_parameters" in lines[0]


@ALL
@pytest.mark.parametrize(
    ("jit", "overlap"), [(True, True), (True, False), (False, False)]
)
def test_a_forgotten_broadcast_is_reported(world, capfd, jit, overlap) -> None:
    training = Training(world, capfd, jit=jit, overlap=overlap, bucket_bytes=64)
    training.change(0.5 if world.rank == world.size - 1 else 0.0)
    last = world.size - 1
    check(world, training.run(8), 0, "b/c", f"rank {last} is not that of rank 0;")
    training.params = ringjax.broadcast_parameters(training.params)
    training.state = ringjax.broadcast_parameters(training.state)
    assert training.run(8) == []


@ALL
def test_drift_is_reported_once_until_it_ends(world, capfd) -> None:
    training = Training(world, capfd)
    assert training.run(4) == []  # the last one was step 3
    training.change(float(world.rank))
    assert training.run(2) == []
    others = ", ".join(map(str, range(1, world.size)))
    word = "rank" if world.size == 2 else "ranks"
    rest = f"{word} {others} is not that of rank 0"
    check(world, training.run(4), 6, "b/c", rest)
    training.params = ringjax.broadcast_parameters(training.params)
    training.state = ringjax.broadcast_parameters(training.state)
    assert training.run(3) == []
    training.params["a"] = training.params["a"] + world.rank
    training.change(float(world.rank))
    check(world, training.run(3), 15, "a", f"{rest}, the first of 2 that differ")


def test_the_one_different_rank_is_named(world, capfd) -> None:
    training = Training(world, capfd)
    training.change(float(world.rank == 0))
    check(world, training.run(1), 0, "b/c", "rank 0 is not that of rank 1")


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda tx: optax.MultiSteps(tx, 2), "a"),
        (lambda tx: optax.masked(tx, {"a": False, "b": True, "none": None}), "b/c"),
        (lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=1.0), "a"),
    ],
    ids=["multisteps", "masked", "inject"],
)
def test_wrappers_of_optax_pass_the_parameters(world, capfd, wrap, found) -> None:
    training = Training(world, capfd, wrap=wrap)
    own = float(world.rank == 2)
    training.change(own)
    training.params["a"] = training.params["a"] + own  # if masked, it may differ
    check(world, training.run(2), 0, found, "rank 2 is not that of rank 0")


def test_every_bit_is_compared_and_nothing_else(world, capfd) -> None:
    training = Training(world, capfd)
    d = np.ones(2, jnp.bfloat16)
    d.view(np.uint16)[1] += world.rank == world.size - 1
    training.params["b"]["d"] = jnp.asarray(d)
    rest = f"rank {world.size - 1} is not that of rank 0;"
    check(world, training.run(1), 0, "b/d", rest)
    # NaNs with equal bits are equal.
    training.params["b"]["d"] = jnp.full(2, jnp.nan, jnp.bfloat16)
    assert training.run(4) == []


@ALL
@pytest.mark.parametrize("key", ["value", "grad"])
@pytest.mark.parametrize("alike", [False, True])
def test_different_extra_arguments_of_an_optimizer_are_reported(
    world, capfd, key, alike
) -> None:
    tx = optax.chain(ringjax.allreduce_grads(), optax.polyak_sgd(1.0))
    params = {"w": jnp.ones(3)}

    @jax.jit
    def step(params, state):
        own = {"value": jnp.float32(1 + world.rank), "grad": {"w": params["w"]}}
        own["grad"]["w"] *= 1 + world.rank
        given = ringjax.allreduce(own) if alike else {**own, "value": own["value"]}
        extra = {"value": jnp.float32(1), key: given[key]}
        return tx.update(own["grad"], state, params, **extra)

    jax.block_until_ready(step(params, tx.init(params)))
    ringjax.barrier()
    lines = [line for line in capfd.readouterr().err.splitlines() if DIFFER in line]
    if alike or world.size == 1 or world.rank:
        assert lines == []
    else:
        (line,) = lines
        assert f"give {key}=ringjax.allreduce({key}) to update" in line


@ALL
@pytest.mark.parametrize("reduced", [False, True])
def test_for_cuda_unreduced_extra_arguments_are_found_while_lowering(
    world, capfd, reduced
) -> None:
    tx, w = ringjax.allreduce_grads(), jnp.ones(3)

    @jax.jit
    def step(w, state, given):
        loss = jax.jit(lambda w: jnp.sum((w - world.rank) ** 2))
        value, grads = jax.value_and_grad(loss)(w)
        value = ringjax.allreduce(value) * 2 if reduced else value
        return tx.update(grads, state, w, value=value, grad=given)

    with lowering.without_device():
        step.trace(w, tx.init(w), w).lower(lowering_platforms=("cuda",))
    lines = [line for line in capfd.readouterr().err.splitlines() if "CUDA" in line]
    if reduced or world.size == 1:
        assert lines == []
    else:
        (line,) = lines
        assert "give value=ringjax.allreduce(value) to update" in line


@ALL
def test_functions_of_one_ranks_data_are_refused(world) -> None:
    params, data = jnp.ones(3), jnp.arange(3.0) + world.rank

    def loss(p, shift=0.0):
        return jnp.sum((p - data - shift) ** 2)

    def update(tx, **extra):
        value, grad = jax.value_and_grad(loss)(params)
        if "value_fn" in extra:
            extra |= {"value": value, "grad": grad}
        return tx.update(grad, tx.init(params), params, **extra)

    front = ringjax.allreduce_grads()
    lbfgs = optax.chain(front, optax.lbfgs())
    sam = optax.chain(
        front, optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    )
    wrong = [
        (lbfgs, {"value_fn": loss}, "value_fn=lambda p: ringjax.allreduce(loss("),
        (lbfgs, {"value_fn": loss, "shift": 1.0}, "value_fn=lambda p: ringjax"),
        (
            sam,
            {"grad_fn": lambda p, _: jax.grad(loss)(p)},
            "ringjax.allreduce(jax.grad",
        ),
    ]
    for tx, extra, remedy in wrong:
        if world.size > 1:
            with pytest.raises(ValueError, match=re.escape(remedy)):
                update(tx, **extra)
        else:
            update(tx, **extra)
    reduced = lambda p: ringjax.allreduce(loss(ringjax.allreduce(p)))  # noqa: E731
    value, grad = jax.value_and_grad(reduced)(params)
    updates, _ = lbfgs.update(
        *(grad, lbfgs.init(params), params), value=value, grad=grad, value_fn=reduced
    )
    every = ringjax.allgather(updates[None])
    np.testing.assert_array_equal(every, np.broadcast_to(every[0], every.shape))
    update(sam, grad_fn=lambda p, _: ringjax.allreduce(jax.grad(loss)(p)))


@ALL
def test_the_first_steps_are_checked_more_often(world, capfd, monkeypatch) -> None:
    check_every(monkeypatch, 1000)
    training = Training(world, capfd)
    assert training.run(1) == []
    training.change(float(world.rank == world.size - 1))
    rest = f"rank {world.size - 1} is not that of rank 0;"
    check(world, training.run(1), 1, "b/c", rest)
    training.params = ringjax.broadcast_parameters(training.params)
    training.state = ringjax.broadcast_parameters(training.state)
    assert training.run(9) == []
    training.change(float(world.rank == world.size - 1))
    assert training.run(89) == []
    check(world, training.run(1), 100, "b/c", rest)


def test_the_check_in_a_scan_and_under_vmap(world, capfd) -> None:
    tx = ringjax.allreduce_grads()
    params = jnp.ones(3) * (1.0 + (world.rank == 0))

    @jax.jit
    def train(params, state):
        def step(carry, _):
            updates, state = tx.update(carry[0], carry[1], carry[0])
            return (carry[0] - 0.1 * updates, state), None

        return jax.lax.scan(step, (params, state), length=4)[0]

    jax.block_until_ready(train(params, tx.init(params)))
    many = jnp.stack([params, params])
    members = jax.vmap(lambda p: tx.update(p, tx.init(p), p)[0])
    jax.block_until_ready(members(many))
    ringjax.barrier()
    lines = [line for line in capfd.readouterr().err.splitlines() if DIFFER in line]
    if world.rank == 0:
        assert len(lines) == 1 and "'' of rank 0 is not that of rank 1" in lines[0]
    else:
        assert lines == []


def test_a_process_set_is_compared_within_itself(world, capfd) -> None:
    members = ringjax.add_process_set([0, 2])
    if members.included():
        tx = ringjax.allreduce_grads(process_set=members)
        # Rank 2 differs from rank 0. Ranks outside of the set are not compared.
        params = {"w": jnp.full(7, float(world.rank == 2))}
        jax.block_until_ready(tx.update(params, tx.init(params), params))
    ringjax.barrier()
    lines = [line for line in capfd.readouterr().err.splitlines() if DIFFER in line]
    if world.rank == 0:
        assert len(lines) == 1 and "'w' of rank 2 is not that of rank 0;" in lines[0]
    else:
        assert lines == []
    ringjax.remove_process_set(members)


def test_other_trees_than_parameters_are_not_compared(world, capfd) -> None:
    tx = ringjax.allreduce_grads()
    grads = {"w": jnp.ones(3)}
    for params in (None, {}, {"w": None}, {"x": jnp.full(3, world.rank)}):
        tx.update(grads, tx.init(grads), params)
    keys = {"w": jax.random.key(world.rank)}
    jax.block_until_ready(tx.update(grads, tx.init(grads), keys))
    ringjax.barrier()
    assert DIFFER not in capfd.readouterr().err


def test_derivatives_ignore_the_check(world) -> None:
    tx = ringjax.allreduce_grads()
    params = jnp.arange(3.0)
    state = tx.init(params)
    grad = jax.grad(lambda p: tx.update(2 * p, state, p)[0].sum())(params)
    np.testing.assert_allclose(grad, 2.0)
