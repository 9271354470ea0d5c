"""ringjax.allreduce against numpy on the stacked inputs, and inside every transform."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from support.draws import draw
from support.stacked import COMPLEX, DTYPES, check_derivatives, draw_all, equal, raises

import ringjax
from ringjax import Average, Compression, Max, Min, Product, Sum, allreduce

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]

REDUCE = {Min: np.minimum, Max: np.maximum, Product: np.multiply, Sum: np.add}
BOOL = {Sum: np.logical_or, Max: np.logical_or, Min: np.logical_and}


def oracle(op: int, xs: list[np.ndarray]) -> np.ndarray:
    if op == Average:
        total = oracle(Sum, xs)
        if total.dtype.kind in "iu":
            return np.trunc(total / len(xs)).astype(total.dtype)
        return (total / np.float64(len(xs))).astype(total.dtype)
    combine = BOOL.get(op, np.logical_and) if xs[0].dtype == bool else REDUCE[op]
    out = xs[0]
    for x in xs[1:]:
        out = combine(out, x).astype(x.dtype)
    return out


@pytest.mark.parametrize(
    "op",
    [pytest.param(Sum, marks=pytest.mark.ranks(1, 2, 3)), Average, Min, Max, Product],
)
def test_every_dtype(world, op) -> None:
    undefined = {Average: ("bool",), Min: COMPLEX, Max: COMPLEX}.get(op, ())
    for dtype in undefined:
        with raises(TypeError, "ringjax.allreduce", f"op={op.name}", dtype):
            allreduce(np.zeros(3, dtype), op)
    xs = draw_all(world.size, (5, 7), [d for d in DTYPES if d not in undefined])
    mine = {dtype: x[world.rank] for dtype, x in xs.items()}
    for f in (allreduce, jax.jit(allreduce, static_argnums=1)):
        for dtype, out in f(mine, op).items():
            tolerance = 0.0 if op != Average else 1e-2 if dtype[-2:] == "16" else 1e-6
            equal(out, oracle(op, xs[dtype]), tolerance)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("shape", "dtype", "count"),
    [
        ((), "float32", 2),
        ((0,), "int8", 1),
        ((3, 0, 2), "bfloat16", 3),
        ((9, 8, 1, 2), "complex64", 4),
        ((7,), "float64", 2),
    ],
)
def test_any_shape_and_tree(world, shape, dtype, count) -> None:
    xs = [draw(world.size, shape, dtype, seed) for seed in range(count)]
    mine = [jax.device_put(x[world.rank]) for x in xs]
    tree = {"a": mine[0], "b": mine[1:], "c": None}
    out = allreduce(tree, Sum)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for got, stack in zip(jax.tree.leaves(out), xs, strict=True):
        equal(got, oracle(Sum, stack))


def test_large_and_strided(world) -> None:
    xs = draw(world.size, (1100, 1003))
    view = xs[world.rank].T[::3, 1:]
    equal(allreduce(view, Sum), oracle(Sum, [x.T[::3, 1:] for x in xs]))


def test_numbers_and_grouped(world) -> None:
    assert float(allreduce(world.rank + 1.5, Sum)) == sum(
        r + 1.5 for r in range(world.size)
    )
    out = ringjax.grouped_allreduce([1, np.ones(3, np.float32), True], op=Max)
    assert isinstance(out, list)
    equal(out[1], np.ones(3, np.float32))
    assert [bool(out[2]), int(out[0])] == [True, 1]
    assert allreduce({}) == {}
    pair = ringjax.grouped_allreduce((1, 2), op=Sum)
    assert isinstance(pair, tuple) and int(pair[1]) == 2 * world.size
    tree = ringjax.grouped_allreduce({"a": 1, "b": (2.0, None)}, op=Max)
    assert tree.keys() == {"a", "b"} and float(tree["b"][0]) == 2
    rows = {"a": np.ones((world.size, 2))}
    for call, shape in (
        (ringjax.grouped_allgather, (world.size**2, 2)),
        (lambda x: ringjax.grouped_broadcast(x, 0), (world.size, 2)),
        (ringjax.grouped_reducescatter, (1, 2)),
        (ringjax.grouped_alltoall, (world.size, 2)),
    ):
        assert call(rows)["a"].shape == shape


def test_scaling(world) -> None:
    xs = draw(world.size, (4, 3), "float64")
    out = allreduce(xs[world.rank], Sum, prescale_factor=0.5, postscale_factor=3)
    equal(out, 3 * sum(0.5 * x for x in xs), 1e-14)
    whole = draw(world.size, (9,), "int32")
    out = allreduce(whole[world.rank], Sum, prescale_factor=np.float32(0.5))
    equal(out, sum(np.trunc(x * 0.5).astype(np.int32) for x in whole))


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression(world, compression) -> None:
    xs = draw(world.size, (1000,), "float32")
    out = allreduce({"x": xs[world.rank], "n": 3}, Sum, compression=compression)
    equal(out["x"], oracle(Sum, xs), 2e-2)
    assert int(out["n"]) == 3 * world.size


# -- inside jax's transforms -----------------------------------------------------------


def test_vmap(world) -> None:
    xs = draw(world.size, (3, 4, 5), "float64")
    out = jax.vmap(partial(allreduce, op=Sum), in_axes=1, out_axes=2)(xs[world.rank])
    equal(out, oracle(Sum, [np.moveaxis(x, 1, 2) for x in xs]))
    nested = jax.jit(jax.vmap(jax.vmap(lambda x: allreduce((x, 2.0), Max))))
    equal(nested(xs[world.rank])[0], oracle(Max, xs))


def test_scan_cond_while_and_checkpoint(world) -> None:
    x = jnp.arange(4.0) + world.rank

    @jax.jit
    def program(x):
        def body(carry, _):
            carry = allreduce(carry, Average)
            return carry + 1, jax.lax.cond(
                carry[0] > 1,
                lambda v: allreduce(v, Max),
                lambda v: -allreduce(v, Min),
                x,
            )

        x, seen = jax.lax.scan(body, x, None, length=4)
        x = jax.lax.while_loop(
            lambda v: allreduce(v[0], Max) < 50, lambda v: allreduce(v, Sum) + 1, x
        )
        return x, seen

    out, seen = program(x)
    xs = [np.arange(4.0) + r for r in range(world.size)]
    for step in range(4):
        mean = sum(xs) / len(xs)
        if mean[0] > 1:
            np.testing.assert_allclose(seen[step], np.max(_start(world), axis=0))
        else:
            np.testing.assert_allclose(seen[step], -np.min(_start(world), axis=0))
        xs = [mean + 1] * world.size
    while np.max([x[0] for x in xs]) < 50:
        xs = [sum(xs) + 1] * world.size
    equal(out, xs[0], 1e-12)
    f = jax.checkpoint(lambda x: jnp.sum(jnp.sin(allreduce(jnp.cos(x), Sum))))
    g = lambda x: jnp.sum(jnp.sin(allreduce(jnp.cos(x), Sum)))  # noqa: E731
    equal(jax.jit(jax.grad(f))(x), jax.grad(g)(x), 1e-12)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("lanes", ["vmap", "jit of vmap", "vmap of jit", "twice"])
def test_lanes_of_a_loop_that_stops_by_a_collective_keep_their_values(
    world, lanes: str
) -> None:
    def halve(x):
        """Halves x until no rank has more than 1; returns x and the number of steps."""
        return jax.lax.while_loop(
            lambda s: allreduce(s[0], Max) > 1.0, lambda s: (s[0] / 2, s[1] + 1), (x, 0)
        )

    mapped = {
        "vmap": jax.vmap(halve),
        "jit of vmap": jax.jit(jax.vmap(halve)),
        "vmap of jit": jax.vmap(jax.jit(halve)),
        "twice": lambda xs: jax.tree.map(
            lambda y: y[0], jax.vmap(jax.vmap(halve))(xs[None])
        ),
    }[lanes]
    starts = np.array([3.0, 20.0, 0.5, 700.0])
    values, counts = mapped(jnp.asarray(starts) * (world.rank + 1))
    times = [max(0, int(np.ceil(np.log2(s * world.size)))) for s in starts]
    equal(counts, times)
    equal(values, starts * (world.rank + 1) / 2.0 ** np.array(times), 1e-12)


def _start(world: Any) -> np.ndarray:
    return np.stack([np.arange(4.0) + r for r in range(world.size)])


def test_donation_and_ahead_of_time(world) -> None:
    f = jax.jit(lambda x: allreduce(x, Sum), donate_argnums=0)
    compiled = f.lower(jnp.ones(1000)).compile()
    for step in range(3):
        x = jnp.full(1000, float(step + world.rank))
        equal(
            compiled(x), np.full(1000, sum(step + r for r in range(world.size)), "f8")
        )
        assert x.is_deleted()


def test_persistent_cache(world, tmp_path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    def run() -> Any:
        return jax.jit(lambda x: allreduce(jnp.sin(x), Sum) * 2)(jnp.arange(64.0))

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {k: getattr(jax.config, k) for k in options}
    try:
        for key, value in options.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()
        first = run()
        entries = sorted(p.name for p in tmp_path.iterdir())
        assert any("cache" in name for name in entries)
        jax.clear_caches()
        equal(run(), first)
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()


def test_one_device_shard_map(world) -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    xs = [np.arange(6.0) + r for r in range(world.size)]
    x = jnp.asarray(xs[world.rank])
    equal(jax.jit(mapped(lambda x: allreduce(x, Sum)))(x), sum(xs))
    equal(jax.jit(mapped(ringjax.allgather))(x), np.concatenate(xs))
    f = mapped(lambda x: ringjax.reducescatter(allreduce(x, Sum) ** 2, Sum))
    slope = jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x)
    equal(slope, world.size * 2 * sum(xs), 1e-12)


# -- derivatives -----------------------------------------------------------------------


def _model(op: int, before: float = 1.0, after: float = 1.0) -> Any:
    reduce = {Sum: jnp.sum, Average: jnp.mean, Min: jnp.min, Max: jnp.max}

    def model(xs):
        y = reduce.get(op, jnp.prod)(before * jnp.stack(xs), axis=0)
        return [after * y] * len(xs)

    return model


@pytest.mark.parametrize("op", [Average, Sum, Min, Max, Product])
def test_derivatives(world, op) -> None:
    # Small integers, because then many elements are equal on several ranks, or zero.
    xs = draw(world.size, (30,), "float64", seed=3)
    check_derivatives(world.rank, lambda x: allreduce(x, op), _model(op), xs)
    check_derivatives(
        world.rank,
        lambda x: allreduce(x, op, prescale_factor=-2.0, postscale_factor=0.5),
        _model(op, -2.0, 0.5),
        xs,
    )


def test_derivatives_of_a_tree(world) -> None:
    xs = draw(world.size, (4,), "float64")
    x = jnp.asarray(xs[world.rank])

    def loss(x, n):
        out = allreduce({"a": x * x, "n": n, "unused": x}, Sum)
        return jnp.sum(out["a"]) * (world.rank + 1)

    weight = sum(r + 1 for r in range(world.size))
    equal(jax.grad(loss)(x, jnp.int32(3)), 2 * xs[world.rank] * weight, 1e-12)


def test_complex_and_hessian(world) -> None:
    zs = draw(world.size, (5,), "complex128")
    f = lambda z: jnp.sum(jnp.abs(allreduce(z, Sum)) ** 2)  # noqa: E731
    expected = world.size * 2 * np.conj(sum(zs))
    equal(jax.grad(f)(jnp.asarray(zs[world.rank])), expected, 1e-12)
    x = jnp.arange(3.0)
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(allreduce(x, Average) ** 3)))(x)
    equal(hessian, np.diag(6 * np.arange(3.0)), 1e-12)


# -- errors ----------------------------------------------------------------------------


def test_bad_arguments(world) -> None:
    x = jnp.ones(3)
    with raises(ValueError, "ringjax.allreduce", "`op` is 17"):
        allreduce(x, 17)
    with raises(ValueError, "ringjax.allreduce", "`op` is 'sum'"):
        allreduce(x, "sum")
    with raises(TypeError, "`prescale_factor` must be a number", "multiply"):
        jax.jit(lambda x, s: allreduce(x, prescale_factor=s))(x, 2.0)
    with raises(ValueError, "`postscale_factor` is 2.0", "bool"):
        allreduce(True, Sum, postscale_factor=2)
    with raises(TypeError, "`tensor` 'k' has dtype float8_e4m3fn"):
        allreduce({"k": jnp.ones(2, jnp.float8_e4m3fn)})
    with raises(TypeError, "`tensor` has dtype int4"):
        allreduce(jnp.ones(2, jnp.int4))
    with raises(TypeError, "`tensor`", "key", "jax.random.key_data"):
        allreduce(jax.random.key(0))
    with raises(TypeError, "`tensor` 'a/0' is a str"):
        allreduce({"a": ["text"]})
    rows = sparse.BCOO((jnp.ones(1), jnp.array([[world.rank]])), shape=(4,))
    for call in (allreduce, ringjax.allgather, ringjax.reducescatter, ringjax.alltoall):
        with raises(TypeError, call.__name__, "'s' is a BCOO of shape (4,)", "todense"):
            call({"s": rows})
    equal(ringjax.broadcast(rows, 0).todense(), np.array([1.0, 0, 0, 0]))
    with raises(TypeError, "ringjax.grouped_allreduce", "is a str"):
        ringjax.grouped_allreduce("text")
    with raises(TypeError, "`compression` is 'bf16'"):
        allreduce(x, compression="bf16")
    equal(allreduce(x, Max), np.ones(3))  # no refused call was sent


@pytest.mark.parametrize("how", [lambda f: f, jax.jit])
def test_gradients_of_integers_pass(world, how) -> None:
    """Gradients of integers have dtype float0 and no values, also while tracing."""
    params = {"w": jnp.ones(2), "i": jnp.int32(3)}

    def grads(p):
        loss = jax.grad(lambda p: jnp.sum(p["w"]) * (world.rank + 1), allow_int=True)
        return allreduce(loss(p))

    out = how(lambda p: grads(p)["w"])(params)
    equal(out, np.full(2, (world.size + 1) / 2))
    assert grads(params)["i"].dtype == jax.dtypes.float0
    tx = ringjax.allreduce_grads()

    def update(p):
        loss = jax.grad(lambda p: jnp.sum(p["w"]) * (world.rank + 1), allow_int=True)
        return tx.update(loss(p), tx.init(p), p)[0]["w"]

    equal(how(update)(params), np.full(2, (world.size + 1) / 2))


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_all_raise_and_continue(world) -> None:
    for how in (lambda f: f, jax.jit):
        call = how(lambda x: allreduce({"w": x}, Sum, name="grads"))
        for _ in range(2):
            with raises(
                jax.errors.JaxRuntimeError, "RINGJAX[", "grads", "'w'", "f32[4]"
            ):
                jax.block_until_ready(call(jnp.ones(3 + (world.rank == 1), "float32")))
            equal(call(jnp.ones(3))["w"], np.full(3, float(world.size)))
