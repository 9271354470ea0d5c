"""`allreduce_grads` as an optax transformation, in a job of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax
from ringjax import runtime
from ringjax.optim import AllreduceState, readiness_order

GRADS = {"b": jnp.arange(3.0), "w": {"k": jnp.ones((2, 2), jnp.bfloat16)}}


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    ringjax.init()
    yield
    ringjax.shutdown()


def seqs(state) -> list[int]:
    """Returns all sequence numbers in an optimizer state."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AllreduceState))
    return [int(s.seq[0]) for s in found if isinstance(s, AllreduceState)]


def check(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("overlap", [True, False, "auto"])
@pytest.mark.parametrize("op", [ringjax.Average, ringjax.Sum, ringjax.Min])
def test_a_single_rank_keeps_its_gradients(overlap, op) -> None:
    tx = ringjax.allreduce_grads(op, overlap=overlap, bucket_bytes=8)
    state = tx.init(GRADS)
    for step in range(3):
        updates, state = jax.jit(tx.update)(GRADS, state)
        check(updates, GRADS)
        assert updates["w"]["k"].dtype == jnp.bfloat16
        assert seqs(state) == [step + 1]


def test_the_state_is_one_sequence_number() -> None:
    state = ringjax.allreduce_grads().init(GRADS)
    assert type(state) is AllreduceState
    assert state.seq.shape == (1,) and state.seq.dtype == jnp.uint32
    assert int(state.seq[0]) == 0


def test_update_works_without_jit() -> None:
    tx = ringjax.allreduce_grads()
    updates, state = tx.update(GRADS, tx.init(GRADS))
    check(updates, GRADS)
    assert seqs(state) == [1]


@pytest.mark.parametrize("tree", [{}, None, (), {"a": None}, {"a": optax.MaskedNode()}])
def test_an_empty_tree_makes_no_call(tree) -> None:
    tx = ringjax.allreduce_grads()
    assert "ringjax" not in jax.jit(tx.update).lower(tree, tx.init(tree)).as_text()
    updates, state = tx.update(tree, tx.init(tree))
    assert updates == tree
    assert seqs(state) == [0]


def test_leaves_without_a_value_pass_through() -> None:
    nothing = np.zeros((2,), jax.dtypes.float0)
    grads = {"a": None, "b": jnp.ones(2), "c": nothing, "d": optax.MaskedNode()}
    tx = ringjax.allreduce_grads()
    updates, state = tx.update(grads, tx.init(grads))
    assert updates["c"] is nothing and updates["a"] is None
    check(updates["b"], grads["b"])
    assert seqs(state) == [1]
    only = {"c": nothing}
    assert seqs(tx.update(only, state)[1]) == [1]


def test_gradients_of_integers_pass_through() -> None:
    def loss(p):
        return (p["w"] * p["i"].sum()).sum()

    params = {"w": jnp.ones(3), "i": jnp.arange(3)}
    tx = ringjax.allreduce_grads()
    grads = jax.grad(loss, allow_int=True)(params)
    updates, _ = tx.update(grads, tx.init(params))
    assert updates["i"].dtype == jax.dtypes.float0
    check(updates["w"], jnp.full(3, 3.0))


def test_integer_leaves_are_reduced() -> None:
    grads = {"i": jnp.arange(3), "u": jnp.ones((), jnp.uint8)}
    tx = ringjax.allreduce_grads(ringjax.Sum)
    check(tx.update(grads, tx.init(grads))[0], grads)


def run(tx, steps: int = 4):
    """Returns parameters and state after some jitted steps on a quadratic function."""
    params = {"a": jnp.ones(4), "b": {"c": jnp.full((2, 3), 2.0)}}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: sum((x**2).sum() for x in jax.tree.leaves(p)))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


LABELS = {"a": "one", "b": {"c": "two"}}


def with_and_without(build):
    """Builds two optimizers: with `allreduce_grads`, and with `optax.identity`."""
    return build(ringjax.allreduce_grads), build(optax.identity)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda t: optax.chain(t(), optax.adam(1e-2)), [4]),
        (lambda t: optax.chain(optax.clip(1.0), t(), optax.sgd(0.1, 0.9)), [4]),
        (lambda t: optax.MultiSteps(optax.chain(t(), optax.adam(1e-2)), 2), [2]),
        (lambda t: optax.MultiSteps(optax.chain(t(), optax.adam(1e-2)), 3), [1]),
        (
            lambda t: optax.chain(
                optax.masked(t(), {"a": True, "b": False}), optax.sgd(0.1)
            ),
            [4],
        ),
        (
            lambda t: optax.multi_transform(
                {
                    "one": optax.chain(t(), optax.adam(1e-2)),
                    "two": optax.chain(t(), optax.sgd(0.1)),
                },
                LABELS,
            ),
            [4, 4],
        ),
        (
            lambda t: optax.inject_hyperparams(
                lambda learning_rate: optax.chain(t(), optax.adam(learning_rate))
            )(learning_rate=1e-2),
            [4],
        ),
        (lambda t: optax.chain(t(), t(), optax.sgd(0.1)), [4, 4]),
        (lambda t: optax.apply_if_finite(optax.chain(t(), optax.sgd(0.1)), 2), [4]),
        (lambda t: optax.flatten(t()), [4]),
    ],
    ids=[
        "chain", "after-clip", "multisteps2", "multisteps3", "masked",
        "multi_transform", "inject", "twice", "apply_if_finite", "flatten",
    ],
)  # fmt: skip
def test_optax_compositions_equal_identity_on_one_rank(build, expected) -> None:
    ours, plain = with_and_without(build)
    params, state = run(ours)
    check(params, run(plain)[0])
    assert seqs(state) == expected


def test_inject_hyperparams_accepts_allreduce_grads() -> None:
    static = ("op", "gradient_predivide_factor")
    tx = optax.inject_hyperparams(ringjax.allreduce_grads, static_args=static)()
    _, state = run(tx)
    assert seqs(state) == [4]
    with pytest.raises(TypeError, match="pass static_args="):
        run(optax.inject_hyperparams(ringjax.allreduce_grads)())


def test_scan_with_donated_arguments() -> None:
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(params, state)
        return (optax.apply_updates(params, updates), state), None

    params = {"w": jnp.ones(5)}
    step = jax.jit(lambda c: jax.lax.scan(body, c, length=3)[0], donate_argnums=0)
    params, state = step((params, tx.init(params)))
    np.testing.assert_allclose(params["w"], 0.9**3, rtol=1e-6)
    assert seqs(state) == [3]


def test_the_step_is_compiled_once() -> None:
    tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-2))
    step = jax.jit(tx.update)
    state = tx.init(GRADS)
    for _ in range(3):
        _, state = step(GRADS, state)
    assert step._cache_size() == 1


def test_the_program_contains_no_rank_and_no_size() -> None:
    tx = ringjax.allreduce_grads()
    text = jax.jit(tx.update).lower(GRADS, tx.init(GRADS)).as_text()
    assert text.count("@ringjax_run") == 1
    assert "size = 0 : i64" in text


def test_overlap_makes_a_start_and_a_done_for_each_bucket() -> None:
    tx = ringjax.allreduce_grads(overlap=True, bucket_bytes=1)
    text = jax.jit(tx.update).lower(GRADS, tx.init(GRADS)).as_text()
    calls = [line for line in text.splitlines() if "@ringjax_" in line]
    kinds = ["start" if "@ringjax_start" in line else "done" for line in calls]
    assert kinds == ["start", "start", "done", "done"]


def test_without_buckets_each_gradient_is_one_call(monkeypatch) -> None:
    config = dataclasses.replace(runtime.config(), bucket_bytes=0)
    monkeypatch.setattr(runtime, "config", lambda: config)
    tx = ringjax.allreduce_grads(overlap=True)
    grads = {"a": jnp.ones(3), "b": jnp.ones(2)}
    text = jax.jit(tx.update).lower(grads, tx.init(grads)).as_text()
    assert text.count("@ringjax_start") == 2


def test_compression_and_predivision_reach_the_call() -> None:
    tx = ringjax.allreduce_grads(
        compression=ringjax.Compression.bf16, gradient_predivide_factor=4.0
    )
    text = jax.jit(tx.update).lower(GRADS, tx.init(GRADS)).as_text()
    from ringjax import _native

    assert f"wire = {_native.DTYPES['bf16']} : i64" in text
    assert "prescale = 2.500000e-01" in text and "postscale = 4.000000e+00" in text


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"op": 7}, ValueError, "`op` is 7"),
        (
            {"op": ringjax.Adasum, "compression": ringjax.Compression.fp16},
            ValueError,
            "`compression` is not supported with op=Adasum",
        ),
        ({"op": "mean"}, ValueError, "`op` is 'mean'"),
        ({"overlap": "yes"}, ValueError, "`overlap` is 'yes'"),
        ({"bucket_bytes": 0}, ValueError, "`bucket_bytes` is 0"),
        ({"compression": "fp16"}, TypeError, "`compression` is 'fp16'"),
        ({"gradient_predivide_factor": 0}, ValueError, "`gradient_predivide_factor`"),
        ({"gradient_predivide_factor": "2"}, TypeError, "`gradient_predivide_factor`"),
        (
            {"gradient_predivide_factor": 2.0, "op": ringjax.Sum},
            ValueError,
            "needs op=Average, not Sum",
        ),
    ],
)
def test_a_bad_argument_is_named_at_once(kwargs, error, text) -> None:
    with pytest.raises(error, match=text):
        ringjax.allreduce_grads(**kwargs)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.array([True]), "op=Average is not defined for .* bool"),
        ("text", "'p/1' is a str"),
        (jax.random.key(0), "'p/1' has dtype key"),
    ],
    ids=["bool", "str", "key"],
)
def test_a_bad_leaf_is_named(leaf, text) -> None:
    tx = ringjax.allreduce_grads()
    with pytest.raises(TypeError, match=text):
        tx.update({"p": [jnp.ones(1), leaf]}, tx.init(None))


@pytest.mark.parametrize("seq", [jnp.zeros((1,)), jnp.zeros((), jnp.uint32)])
def test_a_damaged_state_is_named(seq) -> None:
    with pytest.raises(ValueError, match=r"the state's `seq` must be uint32\[1\]"):
        ringjax.allreduce_grads().update(GRADS, AllreduceState(seq))


# -- the order of readiness ---


def traced_order(params, loss) -> list[str] | None:
    """Returns the parameters in the order in which their gradients are computed."""
    found = []

    @jax.jit
    def step(params):
        grads = jax.grad(loss)(params)
        found.append(readiness_order(jax.tree.leaves(grads)))
        return grads

    step.lower(params)
    names = sorted(params)
    return None if found[0] is None else [names[i] for i in found[0]]


def test_the_last_layer_is_ready_first() -> None:
    count = 12
    params = {f"layer_{i}": jnp.full((3, 3), 0.1) for i in range(count)}

    def loss(p):
        x = jnp.ones((2, 3))
        for i in range(count):
            x = jnp.tanh(x @ p[f"layer_{i}"])
        return x.sum()

    # Not the reversed flatten order, in which layer_9 would come before layer_11.
    assert traced_order(params, loss) == [f"layer_{i}" for i in range(count)][::-1]


def test_readiness_order_is_none_without_a_trace() -> None:
    assert readiness_order([jnp.ones(1), jnp.ones(2)]) is None
    assert readiness_order([]) is None
    found = []
    jax.jit(lambda a, b: found.append(readiness_order([a, b]))).lower(1.0, 2.0)
    assert found == [None]


def test_gradients_of_one_equation_are_in_reversed_order() -> None:
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    inner = jax.jit(lambda p: (p["a"] * p["b"]).sum())
    order = traced_order(params, lambda p: inner(p) + (p["c"] ** 2).sum())
    assert order is not None and order.index("b") < order.index("a")


# -- weights; tests/ranks/jax/test_uneven.py tests them on several ranks ---------------


@pytest.mark.parametrize(
    "weight", [-1, float("nan"), float("inf"), "3", None, [1, 2], 1j, True, jnp.ones(1)]
)
def test_a_weight_is_one_number(weight) -> None:
    tx = ringjax.allreduce_grads()
    grads = {"a": jnp.ones(2)}
    if weight is None:
        check(tx.update(grads, tx.init(grads), weight=weight)[0], grads)
        return
    with pytest.raises(ValueError, match="`weight` is .*expected one real number"):
        tx.update(grads, tx.init(grads), weight=weight)


@pytest.mark.parametrize("op", ["Sum", "Min", "Max", "Product", "Adasum"])
def test_weights_are_for_averages(op) -> None:
    tx = ringjax.allreduce_grads(getattr(ringjax, op))
    with pytest.raises(ValueError, match=f"`weight` needs op=Average, not {op}"):
        tx.update({"a": jnp.ones(2)}, tx.init({}), weight=1)


def test_integers_have_no_weighted_average() -> None:
    tx = ringjax.allreduce_grads()
    with pytest.raises(TypeError, match="floats or complex, not int32"):
        tx.update({"a": jnp.ones(2), "b": jnp.arange(2)}, tx.init({}), weight=1)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_weight_adds_no_collective(overlap) -> None:
    tx = ringjax.allreduce_grads(overlap=overlap, bucket_bytes=1 << 20)
    grads = {"a": jnp.ones(2), "b": jnp.ones((3, 3))}

    def calls(**extra) -> int:
        text = jax.jit(tx.update).lower(grads, tx.init(grads), **extra).as_text()
        return text.count("@ringjax_")

    assert calls(weight=3) == calls() == 1 + overlap


def test_optax_wrappers_pass_the_weight() -> None:
    inner = optax.chain(ringjax.allreduce_grads(), optax.sgd(1.0))
    grads = {"a": jnp.full(2, jnp.nan), "b": jnp.ones(2)}
    mask = {"a": True, "b": False}
    for tx in (
        inner,
        optax.masked(inner, mask),
        optax.MultiSteps(inner, 1),
        optax.inject_hyperparams(
            lambda rate: optax.chain(ringjax.allreduce_grads(), optax.sgd(rate))
        )(rate=1.0),
    ):
        out, _ = jax.jit(tx.update)(grads, tx.init(grads), grads, weight=0.0)
        check(out["a"], jnp.zeros(2))


def test_weights_work_under_vmap() -> None:
    tx = ringjax.allreduce_grads()
    grads, weights = jnp.array([[1.0, 2.0], [jnp.nan, 3.0]]), jnp.array([4.0, 0.0])
    state = tx.init(grads[0])
    out, _ = jax.vmap(lambda g, w: tx.update(g, state, weight=w))(grads, weights)
    check(out, jnp.array([[1.0, 2.0], [0.0, 0.0]]))
