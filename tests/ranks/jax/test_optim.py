"""`allreduce_grads` on several ranks: compositions of optax, models of flax, overlap.

The expected results come from the same optimizer without ringjax. It gets the average,
by NumPy, of the gradients of all ranks, which every rank can compute.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import ringjax
from ringjax.optim import AllreduceState

pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
    pytest.mark.usefixtures("world"),
]


def grads_of(rank: int, step: int):
    """Computes the gradients of any rank in a step."""
    rng = np.random.default_rng([rank, step])
    return {
        "a": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32),
        "b": {"c": jnp.asarray(rng.normal(size=()), jnp.float32), "none": None},
        "d": [jnp.asarray(rng.normal(size=(7,)), jnp.float32), jnp.zeros((0, 2))],
    }


def average(trees):
    return jax.tree.map(
        lambda *xs: jnp.asarray(np.mean(xs, axis=0), xs[0].dtype), *trees
    )


def close(a, b, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, 1e-6), a, b)


def seqs(state) -> list[int]:
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AllreduceState))
    return [int(s.seq[0]) for s in found if isinstance(s, AllreduceState)]


def check_against_plain(world, build, steps: int = 6) -> list[int]:
    """Compares an optimizer with ringjax and one without it, on averaged gradients."""
    ours, plain = build(ringjax.allreduce_grads), build(lambda **kw: optax.identity())
    params = jax.tree.map(jnp.ones_like, grads_of(0, 0))
    state, expected_state = ours.init(params), plain.init(params)
    expected = params
    update, expected_update = jax.jit(ours.update), jax.jit(plain.update)
    for step in range(steps):
        updates, state = update(grads_of(world.rank, step), state, params)
        params = optax.apply_updates(params, updates)
        everyone = average([grads_of(r, step) for r in range(world.size)])
        updates, expected_state = expected_update(everyone, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        close(params, expected)
    return seqs(state)


COMPOSITIONS = {
    "sgd": (lambda t: optax.chain(t(), optax.sgd(0.1, 0.9)), [6]),
    "adam": (lambda t: optax.chain(t(), optax.adam(1e-2)), [6]),
    "overlapped": (
        lambda t: optax.chain(t(overlap=True, bucket_bytes=40), optax.adam(1e-2)),
        [6],
    ),
    "in-place": (lambda t: optax.chain(t(overlap=False), optax.adam(1e-2)), [6]),
    "clip": (
        lambda t: optax.chain(t(), optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        [6],
    ),
    "multisteps": (
        lambda t: optax.MultiSteps(optax.chain(t(), optax.adam(1e-2)), 2),
        [3],
    ),
    "masked": (
        lambda t: optax.chain(
            optax.masked(t(), {"a": True, "b": {"c": True, "none": None}, "d": True}),
            optax.sgd(0.1),
        ),
        [6],
    ),
    "multi_transform": (
        lambda t: optax.multi_transform(
            {
                "one": optax.chain(t(), optax.adam(1e-2)),
                "two": optax.chain(t(overlap=True), optax.sgd(0.1)),
            },
            {"a": "one", "b": {"c": "two", "none": None}, "d": ["two", "one"]},
        ),
        [6, 6],
    ),
    "inject": (
        lambda t: optax.inject_hyperparams(
            lambda learning_rate: optax.chain(t(), optax.adam(learning_rate))
        )(learning_rate=optax.linear_schedule(1e-2, 1e-3, 6)),
        [6],
    ),
    "predivide": (
        lambda t: optax.chain(t(gradient_predivide_factor=8.0), optax.sgd(0.1)),
        [6],
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(world, name) -> None:
    build, expected = COMPOSITIONS[name]
    assert check_against_plain(world, build) == expected


def test_masked_leaves_stay_local(world) -> None:
    tx = optax.masked(ringjax.allreduce_grads(), {"a": True, "own": False})
    grads = {"a": jnp.full(3, float(world.rank)), "own": jnp.full(2, float(world.rank))}
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_allclose(updates["a"], (world.size - 1) / 2)
    np.testing.assert_array_equal(updates["own"], world.rank)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("op", "oracle"),
    [
        ("Average", np.mean),
        ("Sum", np.sum),
        ("Min", np.min),
        ("Max", np.max),
        ("Product", np.prod),
    ],
)
def test_ops(world, op, oracle, overlap) -> None:
    tx = ringjax.allreduce_grads(getattr(ringjax, op), overlap=overlap)
    updates, _ = jax.jit(tx.update)(grads_of(world.rank, 0), tx.init(None))
    everyone = [grads_of(r, 0) for r in range(world.size)]
    close(updates, jax.tree.map(lambda *x: oracle(np.stack(x), axis=0), *everyone))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("wire", "rtol"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_compression(world, wire, rtol, overlap) -> None:
    tx = ringjax.allreduce_grads(
        compression=getattr(ringjax.Compression, wire), overlap=overlap, bucket_bytes=64
    )
    size = world.size
    grads = [
        {"w": jnp.linspace(1, 2, 100) + r, "i": jnp.arange(3)} for r in range(size)
    ]
    updates, _ = jax.jit(tx.update)(grads[world.rank], tx.init(None))
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_allclose(updates["w"], np.mean([g["w"] for g in grads], 0), rtol)
    np.testing.assert_array_equal(updates["i"], np.arange(3))
    everyone = np.asarray(ringjax.allgather(updates["w"][None]))
    assert (everyone == everyone[0]).all()  # all ranks have equal bits


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("overlap", [False, True, "auto"])
def test_a_linen_model_trains_like_one_process(world, overlap) -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for width in (16, 16, 1):
                x = linen.Dense(width)(jnp.tanh(x))
            return x

    net = Net()
    params = ringjax.broadcast_parameters(
        jax.jit(net.init)(jax.random.key(world.rank), DATA[:1])
    )
    tx = optax.chain(
        ringjax.allreduce_grads(overlap=overlap, bucket_bytes=256), optax.adam(1e-2)
    )

    def loss_fn(p, x, y):
        return ((net.apply(p, x)[:, 0] - y) ** 2).mean()

    trained = train(world, loss_fn, params, tx)
    plain = train(None, loss_fn, params, optax.adam(1e-2))
    close(trained, plain, rtol=1e-3)


DATA = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
TARGET = np.sin(DATA.sum(-1))


def train(world, loss_fn, params, tx, steps: int = 10):
    """Trains on the data of this rank, or on all data without `world`."""
    x, y = DATA, TARGET
    if world is not None:
        x, y = (v[world.rank :: world.size] for v in (x, y))

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    return params


def test_an_nnx_model_trains_like_one_process(world) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 16, rngs=rngs)
            self.second = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))[:, 0]

    def trained(tx, x, y):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda m: ((m(x) - y) ** 2).mean())(model)
            optimizer.update(model, grads)

        for _ in range(5):
            step(model, optimizer)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    mine = (DATA[world.rank :: world.size], TARGET[world.rank :: world.size])
    tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-2))
    close(trained(tx, *mine), trained(optax.adam(1e-2), DATA, TARGET), rtol=1e-3)


def test_ensembles_under_vmap_are_reduced_together(world) -> None:
    tx = ringjax.allreduce_grads()
    grads = jnp.arange(6.0).reshape(3, 2) * (world.rank + 1)
    states = jax.vmap(tx.init)(grads)
    updates, states = jax.jit(jax.vmap(tx.update))(grads, states)
    factor = np.mean(np.arange(world.size) + 1)
    np.testing.assert_allclose(updates, np.arange(6.0).reshape(3, 2) * factor)
    assert states.seq.shape == (3, 1) and (np.asarray(states.seq) == 1).all()


def test_steps_in_a_scan(world) -> None:
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(params * (world.rank + 1), state)
        return (optax.apply_updates(params, updates), state), params

    step = jax.jit(lambda c: jax.lax.scan(body, c, length=4), donate_argnums=0)
    (params, state), _ = step((jnp.ones(3), tx.init(None)))
    factor = 1 - 0.1 * np.mean(np.arange(world.size) + 1)
    np.testing.assert_allclose(params, factor**4, rtol=1e-5)
    assert seqs(state) == [4]


def test_a_metric_in_another_program_runs_after_the_step(world) -> None:
    """Eager collectives that follow running steps have one order on all ranks."""
    tx = ringjax.allreduce_grads(overlap=True, bucket_bytes=1 << 16)
    towers = [jnp.full((160, 160), 0.01 * (i + 1)) for i in range(6)]

    @jax.jit
    def step(grads, state):
        grads = [jnp.tanh(g @ g @ g) for g in grads]
        return tx.update(grads, state)

    state = tx.init(None)
    for number in range(20):
        _, state = step(towers, state)
        assert ringjax.broadcast_object(number) == number
        assert ringjax.allreduce_metrics(1.0, op=ringjax.Sum) == world.size
    assert seqs(state) == [20]


@pytest.mark.ranks(3)
def test_a_process_set_trains_by_itself(world) -> None:
    pair = ringjax.add_process_set([0, 2])
    tx = ringjax.allreduce_grads(process_set=pair)
    grads = {"w": jnp.full(4, float(world.rank))}
    if world.rank == 1:
        with pytest.raises(ValueError, match="process_set"):
            tx.update(grads, tx.init(grads))
    else:
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
        np.testing.assert_array_equal(updates["w"], 1.0)
    ringjax.barrier()
    assert ringjax.remove_process_set(pair)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", [False, True])
def test_optimizers_at_different_steps_raise(world, overlap) -> None:
    tx = ringjax.allreduce_grads(overlap=overlap)
    seq = jnp.full((1,), 5 if world.rank == 1 else 4, jnp.uint32)
    text = "rank 1 sent optimizer step 5, rank 0 sent optimizer step 4.*skip a step"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(jax.jit(tx.update)(grads_of(0, 0), AllreduceState(seq)))
    updates, _ = jax.jit(tx.update)(jnp.ones(2), tx.init(None))  # still usable
    np.testing.assert_array_equal(updates, 1.0)


@pytest.mark.ranks(2, 3)
def test_a_different_shape_is_reported_with_its_parameter(world) -> None:
    tx = ringjax.allreduce_grads()
    grads = {"net": {"kernel": jnp.ones(3 if world.rank else 4), "bias": jnp.ones(1)}}
    with pytest.raises(jax.errors.JaxRuntimeError, match="net/kernel"):
        jax.block_until_ready(jax.jit(tx.update)(grads, tx.init(None)))
