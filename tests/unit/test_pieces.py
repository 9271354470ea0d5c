"""Training in pieces on one rank: shares, data, keys, and errors."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax
from ringjax.data import Pieces
from ringjax.elastic.place import Place
from ringjax.pieces.control import Control
from ringjax.pieces.shares import (
    Shares,
    balanced_counts,
    even_counts,
    pieces_of,
    share_of_missing,
)
from ringjax.pieces.signature import Signature


@pytest.fixture(autouse=True)
def initialised():
    ringjax.init()
    yield
    ringjax.shutdown()


# -- shares ----------------------------------------------------------------------------


@pytest.mark.parametrize("places", range(1, 16))
def test_every_piece_has_one_place(places) -> None:
    counts = even_counts(12, [1] * places)
    every = [piece for place in range(places) for piece in pieces_of(place, counts)]
    assert every == list(range(12))
    assert max(counts) - min(counts) <= 1


def test_the_shares_follow_the_speeds() -> None:
    assert balanced_counts(24, [100, 100, 400]) == [11, 11, 2]
    assert balanced_counts(3, [1000, 1]) == [0, 3]
    shares = Shares(12, 2)
    shares.update([1, 1], [100, 105])  # too little to gain
    assert shares.counts == [6, 6]
    for _ in range(3):
        shares.update([1, 1], [100, 200])
    assert shares.counts == [8, 4]


def test_a_place_without_pieces_is_tried_again() -> None:
    shares = Shares(2, 2)
    shares.update([1, 1], [100, 10_000])
    assert shares.counts == [2, 0]
    steps = 0
    while shares.counts == [2, 0]:
        shares.update([1, 1], [100, 0])
        steps += 1
    assert 50 < steps < 1000


def test_lost_places_get_no_pieces() -> None:
    shares = Shares(12, 3)
    shares.update([1, 0, 1], [0, 0, 0])
    assert shares.counts == [6, 0, 6]
    shares.update([1, 0, 1], [100, 0, 300])
    assert shares.counts == [9, 0, 3]


def test_missing_pieces_are_divided_among_the_present() -> None:
    present = [0, 1, 1, 0]
    found = [share_of_missing([1, 4, 7], present, place) for place in (1, 2)]
    assert found == [[1, 7], [4]]


def test_a_piece_that_was_added_twice_is_an_error() -> None:
    total = Control.of_rank(3, Place(0, 1, None))
    total.done[:] = 1, 2, 1
    with pytest.raises(ringjax.errors.RingjaxError, match=r"step 5, .* pieces \[1\]"):
        total.missing(5)


# -- data ------------------------------------------------------------------------------


def test_pieces_hold_every_sample_at_most_once_in_an_epoch() -> None:
    pieces = Pieces(107, batch=24, pieces=12, seed=3)
    assert pieces.steps_per_epoch == 4
    epochs = []
    for epoch in range(2):
        steps = range(4 * epoch, 4 * epoch + 4)
        rows = [pieces.rows(n, p).tolist() for n in steps for p in range(12)]
        assert {len(r) for r in rows} == {2}
        flat = np.concatenate(rows).tolist()
        assert len(set(flat)) == 96 and set(flat) <= set(range(107))
        assert pieces.epoch(steps[0]) == epoch
        epochs.append(flat)
    assert epochs[0] != epochs[1]
    again = Pieces(range(107), batch=24, pieces=12, seed=3)
    assert again.rows(6, 5).tolist() == pieces.rows(6, 5).tolist()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset": 50, "batch": 50}, "multiple of the 12 pieces, such as 48"),
        ({"dataset": 5, "batch": 12}, "5 samples do not fill a batch of 12"),
        ({"dataset": 5, "batch": 12, "pieces": 0}, "pieces is 0"),
    ],
)
def test_wrong_numbers_of_samples_are_named(arguments, text) -> None:
    with pytest.raises(ValueError, match=text):
        Pieces(**arguments)


def test_rows_of_no_piece_are_an_error() -> None:
    with pytest.raises(ValueError, match="piece 12, expected .* 0 to 11"):
        Pieces(24, 24).rows(0, 12)


# -- the step --------------------------------------------------------------------------


def load(number: int, piece: int) -> np.ndarray:
    return np.random.default_rng([number, piece]).normal(size=(4, 3)).astype("f4")


def loss_of(params, data, key):
    return jnp.mean((data @ params - 1) ** 2)


def trained(step, steps: int = 4, loader=load, params=None, **init):
    training = step.init(jnp.zeros(3) if params is None else params, loader, **init)
    for _ in range(steps):
        training, out = step(training, loader)
    return training, out


@pytest.mark.parametrize("one_program", [False, True])
def test_the_step_is_that_of_the_whole_batch(one_program) -> None:
    step = ringjax.pieces.step(loss_of, optax.adam(0.1), 6, one_program=one_program)
    training, loss = trained(step)
    tx, params = optax.adam(0.1), jnp.zeros(3)
    state = tx.init(params)
    for number in range(4):
        batch = np.concatenate([load(number, piece) for piece in range(6)])
        expected, grads = jax.value_and_grad(loss_of)(params, batch, None)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(training.params, params, rtol=1e-5)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert int(training.number) == 4


def test_each_program_is_compiled_once() -> None:
    step = ringjax.pieces.step(loss_of, optax.adam(0.1), 6)
    trained(step)
    programs = step._programs
    assert programs.add._cache_size() == programs.finish._cache_size() == 1


@pytest.mark.parametrize("one_program", [False, True])
def test_keys_depend_on_seed_step_and_piece(one_program) -> None:
    def draws(params, data, key):
        return params.sum(), jax.random.uniform(key)

    def drawn(seed: int, steps: int) -> float:
        step = ringjax.pieces.step(
            *(draws, optax.sgd(0.0), 2),
            seed=seed,
            has_aux=True,
            one_program=one_program,
        )
        return float(trained(step, steps)[1][1])

    key = jax.random.fold_in(jax.random.key(5), 1)
    both = [jax.random.uniform(jax.random.fold_in(key, piece)) for piece in (0, 1)]
    assert drawn(5, 2) == pytest.approx(float(np.mean(both)))
    assert drawn(6, 2) != drawn(5, 2) != drawn(5, 1)


def test_gradients_that_grow_repeat_the_step() -> None:
    calls = []

    def growing(number: int, piece: int) -> np.ndarray:
        calls.append(number)
        return load(number, piece) * np.float32(2.0 ** (20 * number))

    step = ringjax.pieces.step(loss_of, optax.sgd(0.0), 3, balance=False)
    training, _ = trained(step, 3, growing)
    assert [calls.count(number) for number in range(3)] == [4, 6, 6]
    assert np.isfinite(training.params).all()


def test_a_step_can_begin_from_an_older_state() -> None:
    step = make()
    first, _ = step(step.init(jnp.zeros(3), load), load)
    second, loss = step(first, load)
    step(second, load)
    again, same = step(first, load)
    assert int(again.number) == 2 and same == loss
    assert again.params.tolist() == second.params.tolist()


@pytest.mark.parametrize(
    ("short", "expected"), [(1e9, [0, 1, 4, 8]), (0.0, list(range(10)))]
)
def test_short_pieces_are_measured_in_every_fourth_step(
    monkeypatch, short, expected
) -> None:
    monkeypatch.setattr(sys.modules["ringjax.pieces.step"], "_SHORT", short)
    step, waits = make(), []
    training = step.init(jnp.zeros(3), load)
    wait = step._time_of_piece

    def counted(*arguments):
        waits.append(int(training.number))
        return wait(*arguments)

    monkeypatch.setattr(step, "_time_of_piece", counted)
    for _ in range(10):
        training, _ = step(training, load)
    assert waits == expected


def test_not_finite_gradients_become_nan_and_no_repetition() -> None:
    def broken(params, data, key):
        return loss_of(params["a"], data, key) + jnp.log(params["b"] - 1).sum()

    params = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    step = ringjax.pieces.step(broken, optax.sgd(0.1), 2)
    training, loss = trained(step, 1, params=params)
    assert np.isnan(loss) and np.isfinite(training.params["a"]).all()


def test_optimizers_with_extra_arguments_get_the_loss() -> None:
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    training, _ = trained(ringjax.pieces.step(loss_of, tx, 2))
    assert np.isfinite(training.params).all()


def test_parameters_keep_their_dtypes() -> None:
    params = {"a": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(3, jnp.float16)}
    step = ringjax.pieces.step(
        lambda p, data, key: loss_of(p["a"] + p["b"], data, key), optax.adam(0.1), 2
    )
    before = step.init(params, load)
    after, loss = step(before, load)
    assert loss.dtype == jnp.float32
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(
        lambda x: x.dtype, before
    )


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [0, -1, 2.0, True, None])
def test_pieces_that_are_no_positive_integer(pieces) -> None:
    with pytest.raises(ValueError, match="expected a positive integer"):
        ringjax.pieces.step(loss_of, optax.sgd(0.1), pieces)


def make(loss=loss_of, tx=None, **options):
    return ringjax.pieces.step(loss, tx or optax.sgd(0.1), 2, **options)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1)),
        optax.MultiSteps(optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1)), 2),
    ],
)
def test_allreduce_grads_in_the_optimizer_is_refused(tx) -> None:
    with pytest.raises(ValueError, match=r"contains ringjax\.allreduce_grads"):
        make(tx=tx).init(jnp.zeros(3), load)


def test_integer_parameters_are_named() -> None:
    with pytest.raises(TypeError, match=r"parameter 'b/0' is int32\[2\].*nnx\.split"):
        make().init({"a": jnp.zeros(3), "b": [jnp.zeros(2, int)]}, load)


def test_other_leaves_than_arrays_are_named() -> None:
    with pytest.raises(TypeError, match="parameter 'f' is function"):
        make().init({"a": jnp.zeros(3), "f": lambda x: x}, load)


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (lambda p, d, k: p, ValueError, r"float32\[3\] as the loss"),
        (lambda p, d, k: 1, TypeError, "int as the loss"),
        (lambda p, d, k: (p.sum(), 1.0), TypeError, "tuple as the loss.*has_aux"),
    ],
)
def test_losses_that_are_no_float_are_named(loss, error, text) -> None:
    with pytest.raises(error, match=text):
        make(loss).init(jnp.zeros(3), load)


def test_integers_in_aux_are_named() -> None:
    step = make(lambda p, d, k: (p.sum(), {"hits": jnp.zeros(2, int)}), has_aux=True)
    with pytest.raises(TypeError, match=r"aux 'hits' is int32\[2\].*as a float"):
        step.init(jnp.zeros(3), load)


def test_a_loss_without_aux_is_named() -> None:
    with pytest.raises(TypeError, match=r"float32\[\], expected pairs"):
        make(lambda p, d, k: p.sum(), has_aux=True).init(jnp.zeros(3), load)


def test_collectives_in_the_loss_are_refused() -> None:
    def loss(params, data, key):
        return ringjax.allreduce(loss_of(params, data, key))

    with pytest.raises(ValueError, match="calls a collective of ringjax"):
        make(loss).init(jnp.zeros(3), load)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda data: data[:3], r"load\(1, 1\).*as float32\[3, 3\].*float32\[4, 3\]"),
        (lambda data: data > 0, "as bool"),
        (lambda data: (data, data), "one structure"),
    ],
)
def test_other_shapes_of_data_are_named(other, text) -> None:
    def changing(number: int, piece: int) -> object:
        data = load(number, piece)
        return other(data) if (number, piece) == (1, 1) else data

    with pytest.raises(ValueError, match=text):
        trained(make(), 2, changing)


def test_data_that_are_no_arrays_are_named() -> None:
    with pytest.raises(TypeError, match="`load` returned 'name' as str, expected an "):
        make().init(jnp.zeros(3), lambda n, p: {"x": load(n, p), "name": "a"})


def test_data_that_jax_converts_to_one_dtype_are_alike() -> None:
    signature = Signature({"x": np.zeros(2, "f4"), "scale": 1.0})
    signature.check({"x": np.zeros(2, "f8"), "scale": 2.5}, 0, 1)
    signature.check({"x": jnp.zeros(2), "scale": np.float32(0)}, 0, 1)
    with pytest.raises(ValueError, match="'scale' as int32.*before as float32"):
        signature.check({"x": np.zeros(2, "f4"), "scale": 1}, 0, 1)


def test_the_step_is_refused_inside_of_jit_and_vmap() -> None:
    step = make()
    training = step.init(jnp.zeros(3), load)
    with pytest.raises(TypeError, match="loop of the host"):
        jax.jit(lambda t: step(t, load))(training)
    stacked = jax.tree.map(lambda x: x[None], training)
    with pytest.raises(TypeError, match=r"jax\.vmap inside of `loss_of`"):
        jax.vmap(lambda t: step(t, load))(stacked)


def test_groups_of_processes_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(ringjax.runtime, "group_size", lambda: 2)
    with pytest.raises(ValueError, match="groups of 2 processes.*--group-size"):
        make().init(jnp.zeros(3), load)


def test_a_job_is_elastic_only_in_the_training_function(monkeypatch) -> None:
    step = make()
    training = step.init(jnp.zeros(3), load)
    monkeypatch.setattr(ringjax.runtime, "elastic", lambda: True)
    monkeypatch.setattr(ringjax.runtime, "is_newcomer", lambda: False)
    with pytest.raises(ringjax.errors.RingjaxError, match=r"ringjax\.elastic\.run"):
        step(training, load)


def test_init_comes_first() -> None:
    ringjax.shutdown()
    with pytest.raises(ringjax.errors.NotInitialized):
        make().init(jnp.zeros(3), load)
