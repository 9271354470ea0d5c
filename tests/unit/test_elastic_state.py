"""Tests of State: trees, arrays, objects with state_dict, and donated memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax
from ringjax import elastic
from ringjax.control import objects
from ringjax.elastic import values
from ringjax.elastic.donation import Donation
from ringjax.elastic.state_codec import StateDecoder, StateEncoder

STEP = jax.jit(lambda x: x + 1)
DONATING = jax.jit(lambda x: x + 1, donate_argnums=0)


@pytest.fixture(autouse=True)
def _job_of_one():
    ringjax.init()
    yield
    ringjax.shutdown()


def fresh(value: float = 1.0) -> jax.Array:
    """Returns an array that owns its memory and can therefore be donated."""
    return jax.block_until_ready(jnp.full((5, 7), value) * 1.0)


def sent(state, own, *, allow_pickle: bool = False):
    """Encodes `state` and decodes it on a rank whose own state is `own`."""
    encoded = StateEncoder(state, allow_pickle=allow_pickle)
    made = StateDecoder(encoded.structure, own, allow_pickle=allow_pickle)
    for room, data in zip(made.memory, encoded.memory, strict=True):
        room[:] = data
    return made.values()


# -- commits ---------------------------------------------------------------------------


def test_undonated_jax_arrays_are_saved_without_a_copy() -> None:
    state = elastic.State(x=fresh(), step=0)
    for step in (1, 2):
        state.x, state.step = STEP(state.x), step
        state.commit()
    assert state._saved_state["x"] is state.x
    state.x = STEP(state.x)
    state.restore()
    np.testing.assert_array_equal(state.x, np.full((5, 7), 3.0))
    assert state._saved_state["x"] is state.x


@pytest.mark.parametrize("fails_after", [0, 1, 2, 3])
def test_donated_arrays_are_restored(fails_after: int) -> None:
    state = elastic.State(x=fresh(), step=0)
    for step in range(1, fails_after + 1):
        state.x, state.step = DONATING(state.x), step
        state.commit()
    for _ in range(2):
        DONATING(state.x)  # the step fails before it assigns a result
        assert state.x.is_deleted()
        state.restore()
        np.testing.assert_array_equal(state.x, np.full((5, 7), 1.0 + fails_after))
        assert state.step == fails_after


def test_a_late_donation_raises_a_clear_error() -> None:
    state = elastic.State(x=fresh())
    for _ in range(2):
        state.x = STEP(state.x)
        state.commit()
    DONATING(state.x)
    state.restore()
    with pytest.raises(ValueError, match=r"state\.x: its memory was donated.*commit"):
        sent(state._current(), {"x": fresh()})
    state.x = fresh(7)
    state.commit()
    DONATING(state.x)
    state.restore()  # works, because commits copy x since the first restore
    np.testing.assert_array_equal(state.x, np.full((5, 7), 7.0))


def test_names_to_copy() -> None:
    donation, x = Donation(), fresh()
    assert donation.names_to_copy({"x": x, "n": 1}) == {"x", "n"}
    assert donation.names_to_copy({"x": x}) == {"x"}  # no step has run
    donation.discard_inputs()
    y = STEP(x)
    assert donation.names_to_copy({"x": y}) == {"x"}  # y's origin is unknown
    z = STEP(y)
    assert donation.names_to_copy({"x": z}) == set()
    w = DONATING(z)
    assert donation.names_to_copy({"x": w}) == {"x"}
    assert donation.names_to_copy({"x": STEP(w)}) == {"x"}  # remains after one donation


def test_a_failed_program_is_not_committed() -> None:
    def fail(x):
        raise RuntimeError("in the step")

    @jax.jit
    def step(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    state = elastic.State(x=fresh(), step=0)
    with pytest.raises(jax.errors.JaxRuntimeError):  # raised here or by the commit
        state.x, state.step = step(state.x), 1
        state.commit()
    state.restore()
    assert state.step == 0
    np.testing.assert_array_equal(state.x, np.ones((5, 7)))


def test_trees_keep_their_types() -> None:
    tx = optax.adam(1e-3)
    params = {"w": fresh(), "b": [np.zeros(3), fresh(2)]}
    state = elastic.State(
        params=params, opt_state=tx.init(params), key=jax.random.key(1)
    )
    state.params["b"][0][:] = 5
    state.params["b"].append("more")
    kind = type(state.opt_state[0])
    state.opt_state = None
    state.restore()
    assert isinstance(state.opt_state[0], kind)
    assert len(state.params["b"]) == 2 and not state.params["b"][0].any()
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)


def test_objects_with_state_dict() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = [0]

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state) -> None:
            self.count = state["count"]

    counter = Counter()
    state = elastic.State(counter=counter, step=0)
    counter.count.append(1)
    state.restore()
    assert state.counter is counter and counter.count == [0]
    state.counter = other = Counter()
    other.count = [7]
    state.commit()
    other.count.append(8)
    state.restore()
    assert other.count == [7]


def test_custom_states_as_in_horovod() -> None:
    class Mine(elastic.State):
        def __init__(self, **kwargs) -> None:
            self.early = 1  # before the base class is initialised
            super().__init__(bcast_object=lambda obj: obj, get_rank=lambda: 0)
            self.value, self.kept = 1, 1

        def save(self) -> None:
            self.kept = self.value

        def restore(self) -> None:
            self.value = self.kept

        def sync(self) -> None:
            self.value = self._bcast_object(self.value)

    state = Mine()
    state.value = 2
    state.commit()
    state.value = 3
    state.restore()
    state.sync()
    assert state.value == 2
    assert elastic.run(lambda state: state.value)(state) == 2


# -- sending to another rank -----------------------------------------------------------


def test_all_kinds_of_values_can_be_sent() -> None:
    tx = optax.adam(1e-3)
    moments = tx.init(fresh())
    moments = (moments[0]._replace(count=jnp.asarray(5, jnp.int32)), *moments[1:])
    state = {
        "params": {"w": fresh(3), "b": (jnp.zeros(3, jnp.bfloat16), np.arange(3.0))},
        "moments": moments,
        "key": jax.random.key(3),
        "plain": [1, 2.5, None, "x", b"y", {1, 2}, (3, float("inf")), np.float32(3)],
        "empty": np.zeros((0, 3)),
        "small": [jnp.ones(3, jnp.int4), np.ones(3, ">f4")],
        "when": np.array(["2020-01-01"], "M8[D]"),
    }
    got = sent(state, {"moments": tx.init(fresh())})
    same = jax.tree.map(
        lambda a, b: (
            a.dtype == b.dtype and bool((a == b).all())
            if hasattr(a, "dtype")
            else a == b
        ),
        {**state, "key": jax.random.key_data(state["key"])},
        {**got, "key": jax.random.key_data(got["key"])},
    )
    assert all(jax.tree.leaves(same)), same
    assert type(got["moments"]) is tuple and type(got["params"]["b"][1]) is np.ndarray
    assert got["params"]["b"][1].flags.writeable


def test_weak_types_stay_weak() -> None:
    weak = jnp.asarray(1.5)
    assert sent({"x": weak}, {})["x"].weak_type
    assert not sent({"x": jnp.float32(1.5)}, {})["x"].weak_type


def test_states_of_another_structure_are_refused() -> None:
    moments = optax.adam(1e-3).init(fresh())
    with pytest.raises(ValueError, match=r"state\.m\[0\].*ScaleByAdamState.*a None"):
        sent({"m": moments}, {"m": None})
    other = optax.chain(optax.trace(0.9), optax.identity()).init(fresh())
    with pytest.raises(ValueError, match=r"of 3 parts, and here.*TraceState"):
        sent({"m": moments}, {"m": other})


def test_unsupported_values_are_refused() -> None:
    with pytest.raises(TypeError, match=r"state\.f\[0\] is a builtins\.object"):
        sent({"f": [object()]}, {})
    got = sent({"f": [range(3)]}, {}, allow_pickle=True)
    assert got["f"] == [range(3)]
    pickled = StateEncoder({"f": range(3)}, allow_pickle=True)
    with pytest.raises(ValueError, match="came as a pickle"):
        StateDecoder(pickled.structure, {}, allow_pickle=False)


def test_mapping_keeps_the_structure() -> None:
    tree = {"a": [1, (fresh(), None)], "s": optax.EmptyState()}
    assert values.leaves(tree)[0] == 1 and len(values.jax_arrays(tree)) == 1
    again = values.mapped(tree, lambda leaf: leaf)
    assert again == tree and again["a"] is not tree["a"]


# -- sync ------------------------------------------------------------------------------


def test_sync_resets_the_samplers_share_on_rank_0() -> None:
    """`sync` also changes rank 0's own sampler, because it has to match the others."""
    sampler = elastic.ElasticSampler(8, shuffle=False)
    state = elastic.State(sampler=sampler)
    for number, rows in enumerate(sampler.batches(2)):
        if number == 3:
            break
        sampler.record_batch(number, len(rows))
    state.commit()
    assert len(sampler) == 8
    state.sync()
    assert len(sampler) == 2 and list(sampler) == [6, 7]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int4"])
def test_dtypes_missing_in_numpy_are_sent(name: str) -> None:
    there, here = jnp.full(3, 2, name), jnp.zeros(3, name)
    state = {"x": there, "np": np.asarray(there)}
    found = sent(state, {"x": here, "np": np.asarray(here)})
    for value in found.values():
        assert value.dtype == there.dtype
        np.testing.assert_array_equal(np.asarray(value, "f4"), 2)
    again = objects.decode(objects.encode(np.asarray(there)))
    assert again.dtype == there.dtype and (again == np.asarray(there)).all()


class Model:
    """A model like Equinox's, in which functions and settings are leaves too."""

    def __init__(self, *parts) -> None:
        self.parts = parts


jax.tree_util.register_pytree_node(
    Model, lambda model: (model.parts, None), lambda _, parts: Model(*parts)
)


def test_functions_in_a_model_are_not_sent() -> None:
    def model(value: float, act=jax.nn.relu) -> Model:
        return Model(jnp.full(2, value), act, "same", None, [jax.nn.tanh])

    own = model(0.0)
    got = sent({"model": model(2.0)}, {"model": own})["model"]
    np.testing.assert_array_equal(got.parts[0], 2.0)
    assert got.parts[1] is own.parts[1] and got.parts[2:4] == ("same", None)
    with pytest.raises(ValueError, match=r"state.model.* of rank 0 is the"):
        sent({"model": model(2.0)}, {"model": model(0.0, jax.nn.gelu)})
    state = elastic.State(model=own)
    state.commit()
    state.restore()
    assert state.model.parts[1] is own.parts[1]
