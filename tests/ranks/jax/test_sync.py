"""Broadcasts of parameters, exchanges of objects, and metrics, on several ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import ringjax

pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]
SEVERAL_RANKS = pytest.mark.ranks(2, 3)
ONE_OR_THREE_RANKS = pytest.mark.ranks(1, 3)


class LeafTuple(NamedTuple):
    count: int
    rate: float
    on: bool
    z: complex


def all_leaf_kinds(root: int, rank: int):
    """Returns a tree with all kinds of leaves, whose values differ on the root."""
    mine = 1 if rank == root else 0
    return {
        "python": LeafTuple((1 << 62) * mine + 1, 0.1 * mine, bool(mine), 1j * mine),
        "f32": jnp.arange(6.0).reshape(2, 3) * mine,
        "f16": jnp.ones((), jnp.float16) * mine,
        "bf16": jnp.ones(3, jnp.bfloat16) * mine,
        "fp8": jnp.ones(3, jnp.float8_e4m3fn) * mine,
        "fp8e5m2": jnp.ones(3, jnp.float8_e5m2) * mine,
        "npfp8": np.ones(3, jnp.float8_e5m2) * np.asarray(mine, jnp.float8_e5m2),
        "int4": jnp.full(3, 5 * mine, jnp.int4),
        "u32": jnp.full((1,), (1 << 32) - 5, jnp.uint32) * mine,
        "bool": jnp.full(3, bool(mine)),
        "empty": jnp.zeros((0, 3)),
        "np64": np.arange(3.0) / 7 * mine,
        "npi64": np.int64((1 << 60) + 1) * mine,
        "swapped": (np.arange(3, dtype=">i4") * mine).astype(">i4"),
        "strided": np.arange(12.0).reshape(3, 4).T[::2] * mine,
        "date": np.array(["2020-01-02"], "datetime64[D]") if mine else DATE,
        "none": None,
        "tuple": ((), [jnp.full(2, mine)]),
        "key": jax.random.key(7 if mine else 8),
        "keys": jax.random.split(jax.random.key(9 if mine else 8, impl="rbg"), 3),
    }


DATE = np.array(["1999-01-01"], "datetime64[D]")


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            assert x == y
            continue
        assert x.dtype == y.dtype and x.shape == y.shape
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@ONE_OR_THREE_RANKS
@pytest.mark.parametrize("last", [False, True])
def test_every_kind_of_leaf_is_sent_unchanged(world, last) -> None:
    root = world.size - 1 if last else 0
    out = ringjax.broadcast_parameters(all_leaf_kinds(root, world.rank), root_rank=root)
    same(out, all_leaf_kinds(root, root))
    out["np64"][0] = 1.0  # NumPy leaves are writable


def broadcasts() -> int:
    stats = ringjax.runtime.communicator().stats()
    return stats["broadcast"]["calls"] if "broadcast" in stats else 0


def test_a_tree_is_one_operation(world) -> None:
    mine = np.float32(world.rank)
    tree = [jax.device_put(np.full(i, mine)) for i in range(1, 60)]
    before = broadcasts()
    out = ringjax.broadcast_parameters(tree)
    assert broadcasts() == before + 1
    for i, x in enumerate(out, 1):
        np.testing.assert_array_equal(x, np.zeros(i))


def test_leaves_with_equal_path_texts_are_distinct(world) -> None:
    mine = world.rank + 1
    out = ringjax.broadcast_parameters({"a/b": mine, "a": {"b": 10 * mine}})
    assert out == {"a/b": 1, "a": {"b": 10}}


def test_empty_trees(world) -> None:
    for tree in ({}, None, (), {"a": None}):
        assert ringjax.broadcast_parameters(tree) == tree


def test_a_complete_train_state(world) -> None:
    net = linen.Dense(3)
    tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-2))

    def fresh(seed):
        variables = net.init(jax.random.key(seed), jnp.ones((1, 2)))
        return TrainState.create(apply_fn=net.apply, params=variables, tx=tx)

    state = fresh(world.rank + 10)
    if world.rank == 0:  # the root has already made three steps
        opt_state = (state.opt_state[0]._replace(seq=jnp.full(1, 3, jnp.uint32)),)
        state = state.replace(step=3, opt_state=(*opt_state, *state.opt_state[1:]))
    state = ringjax.broadcast_parameters(state)
    assert type(state.step) is int and state.step == 3
    assert state.opt_state[0].seq.dtype == jnp.uint32
    same(state.params, fresh(10).params)
    grads = jax.tree.map(jnp.ones_like, state.params)
    state = jax.jit(lambda s: s.apply_gradients(grads=grads))(state)
    assert int(state.opt_state[0].seq[0]) == 4


def test_an_nnx_state_with_its_random_streams(world) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def fresh(seed):
        return nnx.state(Net(nnx.Rngs(params=seed, dropout=seed + 1)))

    same(ringjax.broadcast_parameters(fresh(world.rank)), fresh(0))


@ONE_OR_THREE_RANKS
def test_inside_jit(world) -> None:
    root = world.size - 1
    tree = {"w": jnp.full(3, world.rank), "key": jax.random.key(world.rank), "n": 2}
    for small in (jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.int4, jnp.uint4):
        tree[small.__name__] = jnp.full(3, world.rank, small)
    out = jax.jit(lambda t: ringjax.broadcast_parameters(t, root))(tree)
    for small in (jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.int4, jnp.uint4):
        assert out[small.__name__].dtype == small
        np.testing.assert_array_equal(out[small.__name__].astype("f4"), root)
    np.testing.assert_array_equal(out["w"], root)
    assert int(out["n"]) == 2
    same(out["key"], jax.random.key(root))


@SEVERAL_RANKS
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda r: {"w": jnp.ones(2 + r)},
            r"'w': rank 0 has float32\[2\], rank 1 has float32\[3\]",
        ),
        (
            lambda r: {"w": jnp.ones(2, jnp.float16 if r else jnp.float32)},
            r"'w': rank 0 has float32\[2\], rank 1 has float16\[2\]",
        ),
        (
            lambda r: {"w": 1, **({"b": 1} if r else {})},
            "'b': rank 0 has nothing, rank 1",
        ),
        (
            lambda r: {"w": 1} if r else {},
            "'w': rank 0 has nothing, rank 1 has a Python",
        ),
        (
            lambda r: {"n": {"w": 1.0 if r else 1}},
            "'n/w': rank 0 has a Python int, rank",
        ),
        (
            lambda r: jax.random.key(0, impl="rbg" if r else None),
            r"rank 0 has key<fry>\[\], rank 1 has key<rbg>\[\]",
        ),
    ],
    ids=["shape", "dtype", "more", "empty", "number", "key"],
)
def test_different_trees_raise_on_all_ranks(world, make, text) -> None:
    with pytest.raises(ringjax.errors.Mismatch, match=text):
        ringjax.broadcast_parameters(make(world.rank))
    assert ringjax.broadcast_parameters(world.rank) == 0  # still usable


class Model:
    """A model like those of Equinox, in which functions and settings are leaves."""

    def __init__(self, *parts):
        self.parts = parts


jax.tree_util.register_pytree_node(
    Model, lambda m: (m.parts, None), lambda _, parts: Model(*parts)
)


def test_a_model_whose_leaves_are_not_all_arrays(world) -> None:
    def parts(rank):
        weight = jnp.full((2, 2), rank + 1.0)
        return weight, jax.nn.relu, "same", None, lambda x: x, 3 + rank, range(2)

    mine = Model(*parts(world.rank))
    model = ringjax.broadcast_parameters(mine)
    assert type(model) is Model
    np.testing.assert_array_equal(model.parts[0], 1.0)
    assert model.parts[5] == 3
    for place in (1, 2, 3, 4, 6):
        assert model.parts[place] is mine.parts[place]


@SEVERAL_RANKS
def test_leaves_that_are_not_sent_must_be_equal(world) -> None:
    tree = {"w": jnp.ones(2), "how": "same" if world.rank == 0 else "valid"}
    text = "'how': rank 0 has the str 'same', rank 1 has the str 'valid'"
    with pytest.raises(ringjax.errors.Mismatch, match=text):
        ringjax.broadcast_parameters(tree)


@SEVERAL_RANKS
def test_different_roots_raise(world) -> None:
    with pytest.raises(
        ringjax.errors.Mismatch, match="`root_rank`: rank 0 has 0, rank 1"
    ):
        ringjax.broadcast_parameters({"w": jnp.ones(1)}, root_rank=min(world.rank, 1))


def test_numpy_and_jax_arrays_do_not_mismatch(world) -> None:
    value = np.arange(3, dtype=np.float32) + world.rank
    tree = value if world.rank else jnp.asarray(value)
    out = ringjax.broadcast_parameters(tree)
    assert type(out) is type(tree)
    np.testing.assert_array_equal(out, np.arange(3))


@pytest.mark.parametrize(
    ("leaf", "error", "text"),
    [
        (jax.ShapeDtypeStruct((2,), "f4"), TypeError, "'x' is a ShapeDtypeStruct"),
        (object(), TypeError, "'x' is a object, expected an array"),
        (np.array([None]), TypeError, "'x' is an array of Python objects"),
        (1 << 70, ValueError, "'x' is an int of more than 64 bits"),
    ],
    ids=["shape", "opaque", "objects", "int"],
)
def test_a_leaf_that_cannot_be_sent_is_named(world, leaf, error, text) -> None:
    with pytest.raises(error, match=text):
        ringjax.broadcast_parameters({"x": leaf})
    with pytest.raises(TypeError, match="is its class registered with JAX"):
        ringjax.broadcast_parameters(object())


def test_a_root_outside_of_the_world_is_refused(world) -> None:
    for call in (ringjax.broadcast_parameters, ringjax.broadcast_object):
        with pytest.raises(ValueError, match="root_rank is 9"):
            call(1, 9)


# -- objects ---

OBJECT = {"lr": 1e-3, 5: (None, [True, b"\0"]), "name": "ß", "x": np.arange(4.0)}


@ONE_OR_THREE_RANKS
@pytest.mark.parametrize("last", [False, True])
def test_broadcast_object(world, last) -> None:
    root = world.size - 1 if last else 0
    # The objects of other ranks are ignored.
    mine = OBJECT if world.rank == root else object()
    out = ringjax.broadcast_object(mine, root)
    np.testing.assert_array_equal(out.pop("x"), np.arange(4.0))
    assert out == {k: v for k, v in OBJECT.items() if k != "x"}


@pytest.mark.parametrize("length", [0, 1, 100_000, 3_000_001])
def test_large_and_empty_objects(world, length) -> None:
    data = bytes(range(256)) * (length // 256 + 1)
    assert ringjax.broadcast_object(data[:length]) == data[:length]


@ONE_OR_THREE_RANKS
def test_allgather_object(world) -> None:
    mine = {"rank": world.rank, "long": "x" * (200 * world.rank)}
    everyone = ringjax.allgather_object(mine)
    assert [x["rank"] for x in everyone] == list(range(world.size))
    assert [len(x["long"]) for x in everyone] == [200 * r for r in range(world.size)]


class Unencodable:
    """An object that the safe format cannot encode."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unencodable)

    __hash__ = None


def test_pickle_must_be_allowed(world) -> None:
    with pytest.raises(
        TypeError, match="`obj` of rank 0 cannot be sent: .*Unencodable"
    ):
        ringjax.broadcast_object(Unencodable())
    with pytest.raises(
        TypeError, match="`obj` of rank 0 cannot be sent: .*Unencodable"
    ):
        ringjax.allgather_object(Unencodable())
    assert ringjax.broadcast_object(Unencodable(), allow_pickle=True) == Unencodable()
    assert (
        ringjax.allgather_object(Unencodable(), allow_pickle=True)
        == [Unencodable()] * world.size
    )


@SEVERAL_RANKS
def test_all_ranks_name_the_rank_that_cannot_send(world) -> None:
    with pytest.raises(TypeError, match="`obj` of rank 1 cannot be sent"):
        ringjax.allgather_object(Unencodable() if world.rank == 1 else 1)


@SEVERAL_RANKS
def test_a_pickle_is_refused_where_it_is_not_allowed(world) -> None:
    if world.rank == 0:
        assert (
            ringjax.broadcast_object(Unencodable(), allow_pickle=True) == Unencodable()
        )
    else:
        with pytest.raises(ValueError, match="`obj` of rank 0: the sender has pickled"):
            ringjax.broadcast_object(None)


def test_not_inside_jit(world) -> None:
    for call in (
        ringjax.broadcast_object,
        ringjax.allgather_object,
        ringjax.allreduce_metrics,
    ):
        with pytest.raises(
            TypeError, match=f"{call.__name__} runs outside of jit only"
        ):
            jax.jit(lambda x, call=call: call(1) or x).lower(1.0)


@pytest.mark.ranks(3)
def test_process_sets(world) -> None:
    pair = ringjax.add_process_set([0, 2])
    if world.rank != 1:
        mine = 10 * world.rank
        assert ringjax.allgather_object(mine, process_set=pair) == [0, 20]
        assert ringjax.broadcast_object(mine, 2, process_set=pair) == 20
        assert ringjax.broadcast_parameters(mine, 2, process_set=pair) == 20
        assert ringjax.allreduce_metrics(mine, process_set=pair) == 10.0
        with pytest.raises(TypeError, match="`obj` of rank 2"):
            ringjax.allgather_object(
                Unencodable() if world.rank else 1, process_set=pair
            )
        with pytest.raises(ringjax.errors.Mismatch, match="rank 0 has .* rank 2 has"):
            ringjax.broadcast_parameters(jnp.ones(1 + world.rank), process_set=pair)
    else:
        for call in (ringjax.allgather_object, ringjax.broadcast_parameters):
            with pytest.raises(ValueError, match="process_set"):
                call(1, process_set=pair)
    ringjax.barrier()
    assert ringjax.remove_process_set(pair)


# -- metrics ---


@ONE_OR_THREE_RANKS
def test_metrics_are_exact_to_float64(world) -> None:
    values = [0.1 + r * 1e-12 for r in range(world.size)]
    out = ringjax.allreduce_metrics(
        {"loss": values[world.rank], "n": [world.rank, None]}
    )
    assert type(out["loss"]) is float
    assert out["loss"] == pytest.approx(np.mean(values), rel=1e-15)
    assert out["n"] == [(world.size - 1) / 2, None]
    total = ringjax.allreduce_metrics((1 << 60) + 1, op=ringjax.Sum)
    assert total == ((1 << 60) + 1) * world.size and type(total) is int
    many = ringjax.allreduce_metrics(1 << 62, op=ringjax.Sum)
    assert many == world.size << 62  # integers of Python do not overflow
    assert ringjax.allreduce_metrics(world.rank, op=ringjax.Max) == world.size - 1
    assert ringjax.allreduce_metrics(world.rank - 5, op=ringjax.Min) == -5
    product = ringjax.allreduce_metrics(world.rank + 1.0, op=ringjax.Product)
    assert product == math.factorial(world.size)


def test_metrics_of_arrays_and_device_values(world) -> None:
    mine = {"v": jnp.arange(3.0) * world.rank, "s": jnp.float32(world.rank), "b": True}
    out = ringjax.allreduce_metrics(mine)
    middle = (world.size - 1) / 2
    assert type(out["s"]) is float and out["s"] == middle and out["b"] == 1.0
    assert type(out["v"]) is np.ndarray
    np.testing.assert_allclose(out["v"], np.arange(3) * middle)


@ONE_OR_THREE_RANKS
def test_weighted_metrics(world) -> None:
    weights = [3.0 * r + 1 for r in range(world.size)]
    values = [r / 7 for r in range(world.size)]
    out = ringjax.allreduce_metrics(values[world.rank], weight=weights[world.rank])
    assert out == pytest.approx(np.average(values, weights=weights), rel=1e-14)
    # The value of a rank with weight 0 does not count.
    weight = 0 if world.rank else 5
    assert ringjax.allreduce_metrics(world.rank + 0.5, weight=weight) == 0.5
    assert math.isnan(ringjax.allreduce_metrics(1.0, weight=0))


@SEVERAL_RANKS
def test_an_integer_on_one_rank_and_a_float_on_another(world) -> None:
    mine = 0 if world.rank else 0.5
    assert ringjax.allreduce_metrics(mine, op=ringjax.Sum) == 0.5


@SEVERAL_RANKS
def test_different_metrics_raise(world) -> None:
    name = "loss" if world.rank else "accuracy"
    with pytest.raises(
        ringjax.errors.Mismatch, match="'accuracy': rank 0 has .* nothing"
    ):
        ringjax.allreduce_metrics({name: 1.0})
    with pytest.raises(ringjax.errors.Mismatch, match="`op`: rank 0 has Average"):
        ringjax.allreduce_metrics(1.0, ringjax.Sum if world.rank else ringjax.Average)


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (({"x": "a"},), TypeError, "'x' is a str"),
        (({"x": 1j},), TypeError, "'x' is a complex"),
        ((1.0, ringjax.Sum, 2.0), ValueError, "`weight` needs op=Average"),
        ((1.0, ringjax.Average, -1.0), ValueError, "`weight` is -1"),
        ((1.0, ringjax.Average, math.nan), ValueError, "`weight` is nan"),
        ((1.0, 99), ValueError, "`op` is 99"),
    ],
)
def test_bad_metrics_are_named(world, args, error, text) -> None:
    tree, *rest = args
    op = rest[0] if rest else ringjax.Average
    with pytest.raises(error, match=text):
        ringjax.allreduce_metrics(tree, op, weight=rest[1] if rest[1:] else None)
