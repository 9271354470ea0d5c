"""Ranks with unequal amounts of data train like one process with all data.

Every rank can compute the data of all ranks, so the expected results come from plain
optax on global batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax
from ringjax import eager, errors
from ringjax.data import even_steps
from ringjax.xla import jax_private

# Only the comparison with one process runs on several numbers of ranks.
pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
    pytest.mark.usefixtures("world"),
]

ROWS = (9, 0, 14, 3, 4)  # rows of each rank; rank 1 has none
SIZE = 4


@pytest.fixture(autouse=True)
def enable_x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def data_of(rank: int, rows: int) -> list[dict[str, Any]]:
    """Returns the batches of a rank. The last batch may be short or empty."""
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 1))
    return [{"x": x[i : i + SIZE], "y": y[i : i + SIZE]} for i in range(0, rows, SIZE)]


class Loader:
    """A data loader without a length, which can be iterated many times."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class Sized(Loader):
    def __len__(self) -> int:
        return len(self._batches)


class WithoutLength(Loader):
    def __len__(self) -> int:
        raise TypeError("as a DataLoader of an IterableDataset")


def losses(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return ((hidden @ params["v"] - batch["y"]) ** 2)[:, 0]


def start() -> Any:
    rng = np.random.default_rng(99)
    return {"w": jnp.asarray(rng.normal(size=(3, 5))), "v": jnp.ones((5, 1))}


def train_alone(size: int, epochs: int) -> Any:
    """Trains in one process, with the rows of all ranks in one batch for each step."""
    params, tx = start(), optax.adam(0.1)
    state = tx.init(params)
    everyone = [data_of(rank, ROWS[rank]) for rank in range(size)]
    for _ in range(epochs):
        for step in range(max(map(len, everyone))):
            parts = [batches[step] for batches in everyone if step < len(batches)]
            batch = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
            grads = jax.grad(lambda p, b=batch: losses(p, b).mean())(params)
            updates, state = tx.update(grads, state)
            params = optax.apply_updates(params, updates)
    return params


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("loader", "overlap", "jit"),
    [
        (Sized, True, True),
        (Sized, False, True),
        (Loader, True, False),
        (WithoutLength, False, False),
    ],
)
def test_training_is_that_of_one_process(world, loader, overlap, jit) -> None:
    params = start()
    tx = optax.chain(
        ringjax.allreduce_grads(overlap=overlap, bucket_bytes=64), optax.adam(0.1)
    )
    state = tx.init(params)

    def step(params, state, batch, mask):
        grads = jax.grad(lambda p: jnp.mean(losses(p, batch), where=mask))(params)
        updates, state = tx.update(grads, state, params, weight=mask.sum())
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    mine = loader(data_of(world.rank, ROWS[world.rank]))
    epochs, counts = 2, []
    for _ in range(epochs):
        counts.append(0)
        for batch, mask in even_steps(mine, batch_size=SIZE):
            params, state = step(params, state, batch, mask)
            counts[-1] += int(mask.sum())
    assert counts == [ROWS[world.rank]] * epochs
    assert not jit or step._cache_size() == 1
    expected = train_alone(world.size, epochs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), params, expected
    )


def test_weighting_the_loss_equals_weighting_gradients(world) -> None:
    """A weighted loss, as in docs/train/data.md, gives the weighted gradients."""
    params = start()
    tx = optax.chain(ringjax.allreduce_grads(ringjax.Sum), optax.adam(0.1))
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch, mask):
        total = ringjax.allreduce(mask.sum(), ringjax.Sum)
        grads = jax.grad(lambda p: jnp.sum(losses(p, batch) * mask) / total)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mine = data_of(world.rank, ROWS[world.rank])
    for batch, mask in even_steps(mine, batch_size=SIZE):
        params, state = step(params, state, batch, mask)
    expected = train_alone(world.size, 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), params, expected
    )


def test_loaders_with_and_without_length(world) -> None:
    batches = [np.ones((2, 3))] * (world.rank + 1)
    mine = iter(batches) if world.rank == world.size - 1 else batches
    steps = [(batch.shape, mask.tolist()) for batch, mask in even_steps(mine)]
    assert steps == [((2, 3), [own, own]) for own in [True] * len(batches)] + [
        ((2, 3), [False] * 2)
    ] * (world.size - len(batches))


def test_no_rank_has_data() -> None:
    assert list(even_steps([])) == []
    assert list(even_steps(iter(()))) == []


def test_device_arrays_stay_on_their_device(world) -> None:
    batches = [jnp.ones((3, 2)), jnp.full((1, 2), 7.0)][: 2 - world.rank % 2]
    for batch, mask in even_steps(batches):
        assert isinstance(batch, jax.Array) and batch.shape == (3, 2)
        assert set(np.asarray(batch).ravel()) <= ({1.0} if mask.sum() != 1 else {7.0})


def test_a_batch_without_rows_has_weight_zero() -> None:
    given = [np.ones((2, 1)), np.ones((0, 1)), np.ones((1, 1))]
    found = [(b.tolist(), m.tolist()) for b, m in even_steps(given)]
    ones = [[1.0], [1.0]]
    assert found == [(ones, [True] * 2), (ones, [False] * 2), (ones, [True, False])]


def test_a_process_set_has_steps_of_its_own(world) -> None:
    members = ringjax.add_process_set(list(range(0, world.size, 2)))
    if members.included():
        tx = ringjax.allreduce_grads(process_set=members)
        state = tx.init(jnp.zeros(2))
        batches = [np.full((2, 2), float(world.rank))] * (world.rank + 1)
        for step, (batch, mask) in enumerate(even_steps(batches, process_set=members)):
            grads, state = tx.update(batch.mean(0), state, weight=mask.sum())
            there = [r for r in members.ranks if r >= step]
            np.testing.assert_array_equal(grads, np.mean(there))
        assert int(state.seq[0]) == max(members.ranks) + 1
    ringjax.barrier()
    ringjax.remove_process_set(members)


# -- weights alone ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_weights_are_exact_also_where_gradients_are_not(
    world, compression, dtype
) -> None:
    # Weights above 65504, the largest float16. They are integers, which float32 holds
    # exactly.
    weights = [70_001.0, 0.0, 129.0, 3.0, 70_003.0][: world.size]
    values = [0.25, np.nan, 0.25, 0.25, 0.25][: world.size]
    if compression == "fp16":
        weights = [w / 1024 for w in weights]
    tx = ringjax.allreduce_grads(compression=getattr(ringjax.Compression, compression))
    grads = {"a": jnp.full((3, 5), values[world.rank], dtype), "b": jnp.ones((), dtype)}
    update = jax.jit(lambda grads, state, w: tx.update(grads, state, weight=w))
    out, state = update(grads, tx.init(grads), weights[world.rank])
    assert out["a"].dtype == grads["a"].dtype and int(state.seq[0]) == 1
    wide = jax.tree.map(lambda x: np.asarray(x).astype("c16"), out)
    exact = dtype != "bfloat16" and (compression == "none" or dtype == "complex64")
    tolerance = 1e-6 if exact else 2e-2
    np.testing.assert_allclose(wide["a"], 0.25, rtol=tolerance)
    np.testing.assert_allclose(wide["b"], 1.0, rtol=tolerance)


def test_the_sum_of_the_weights_is_not_compressed(world) -> None:
    tx = ringjax.allreduce_grads(compression=ringjax.Compression.bf16)
    # bfloat16 would round 1 + 2^-10 to 1.
    weight = (1 + 2.0**-10) * 2.0**10 * world.size
    out, _ = tx.update(jnp.float32(1.0) / weight, tx.init(0.0), weight=weight)
    np.testing.assert_allclose(out, 1.0 / weight, rtol=1e-7)


@pytest.mark.parametrize("overlap", [True, False])
def test_all_weights_are_zero(overlap) -> None:
    tx = ringjax.allreduce_grads(overlap=overlap)
    grads = {"a": jnp.full(3, jnp.nan), "b": jnp.ones(2, jnp.float16)}
    out, _ = jax.jit(tx.update)(grads, tx.init(grads), weight=0)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)


def test_micro_batches_are_added_up_by_hand(world) -> None:
    counts = [world.rank, 2, world.rank % 2]
    everyone = [(r, 2, r % 2) for r in range(world.size)]
    tx = ringjax.allreduce_grads()

    @jax.jit
    def step(state, counts):
        def add(total, each):
            number, n = each
            return (total[0] + n * (number + 1.0), total[1] + n), None

        (total, n), _ = jax.lax.scan(add, (0.0, 0), (jnp.arange(3), counts))
        return tx.update(total / n, state, weight=n)

    out, _ = step(tx.init(0.0), jnp.asarray(counts))
    total = sum(n * (i + 1.0) for row in everyone for i, n in enumerate(row))
    np.testing.assert_allclose(out, total / np.sum(everyone), rtol=1e-14)


def test_predivided_gradients_have_the_same_average(world) -> None:
    tx = ringjax.allreduce_grads(gradient_predivide_factor=8.0)
    out, _ = tx.update(float(world.rank), tx.init(0.0), weight=world.rank + 1)
    weights = np.arange(world.size) + 1.0
    np.testing.assert_allclose(out, np.average(weights - 1, weights=weights), 1e-14)


def test_a_missing_weight_raises(world) -> None:
    tx = ringjax.allreduce_grads()
    extra = {"weight": 3} if world.rank == 0 else {}
    grads = {"a": jnp.ones(2)}
    with (
        pytest.raises(errors.Mismatch, match="'grads with weights'"),
        errors.translated(),
    ):
        jax.block_until_ready(tx.update(grads, tx.init(grads), **extra))


def test_other_ranks_do_not_wait_for_the_compiled_step(world) -> None:
    """`even_steps` exchanges lengths on the eager lane, not in the compiled step."""
    handle = eager.allreduce_async(1.0, name="beside", op=ringjax.Sum)
    assert len(list(even_steps(iter([np.ones((1, 1))] * 3)))) == 3
    assert eager.synchronize(handle) == world.size


def _batch_norm(h: Any, rows: int) -> Any:
    """Normalizes `h` over the rows of all ranks, as batch normalization does."""
    total = ringjax.allreduce(jnp.float64(rows), ringjax.Sum)
    sums = ringjax.allreduce((h.sum(0), (h * h).sum(0)), ringjax.Sum)
    mean, square = sums[0] / total, sums[1] / total
    return (h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit])
def test_a_weighted_loss_is_right_where_collectives_are_in_it(world, how) -> None:
    rows = [
        data_of(r, n)[0]["x"] if n else np.zeros((0, 3)) for r, n in enumerate(ROWS)
    ]
    everyone = np.concatenate(rows[: world.size])
    own = rows[world.rank]
    w = jnp.asarray(np.random.default_rng(9).normal(size=(3, 2)))

    def loss(w):  # NaN on a rank that has no rows
        return jnp.mean(jnp.tanh(_batch_norm(own @ w, len(own))))

    def expected_loss(w):
        h = everyone @ w
        mean, square = h.mean(0), (h * h).mean(0)
        return jnp.mean(jnp.tanh((h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)))

    tx = ringjax.allreduce_grads()

    def update(w):
        grads = jax.grad(lambda w: ringjax.weighted_loss(loss(w), len(own)))(w)
        return tx.update(grads, tx.init(w), w)[0]

    if len(own) or world.size == 1:
        value = ringjax.weighted_loss(jnp.float32(2), len(own))
    else:
        value = ringjax.weighted_loss(jnp.float32(jnp.nan), 0)
        assert value == 0
    share = world.size * len(own) / len(everyone)
    np.testing.assert_allclose(value, 2 * share, rtol=1e-6)
    np.testing.assert_allclose(how(update)(w), jax.grad(expected_loss)(w), rtol=1e-9)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint])
def test_weights_behind_a_collective_in_the_loss_are_refused(world, inner) -> None:
    tx, w = ringjax.allreduce_grads(), jnp.ones(3)

    def update(loss):
        grad = jax.grad(inner(loss))
        if inner is jax.jit:
            grad = jax.jit(grad)
        step = jax.jit(lambda w: tx.update(grad(w), tx.init(w), w, weight=2)[0])
        return step(w)

    def loss_with_collective(w):
        return jnp.sum((w - ringjax.allreduce(w)) ** 2)

    if world.size == 1:
        update(loss_with_collective)
    else:
        with pytest.raises(ValueError, match=r"ringjax\.weighted_loss"):
            update(loss_with_collective)
    # The collective of a constant is not differentiated, so weights are allowed.
    out = update(lambda w: jnp.sum(w**2 * ringjax.allreduce(jnp.float64(3))))
    np.testing.assert_allclose(out, 6.0)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("jit", [False, True])
def test_weights_of_gradients_from_another_program(
    world, capfd, monkeypatch, jit
) -> None:
    """ringjax cannot see whether the loss of such gradients has a collective."""
    monkeypatch.setattr(ringjax.optim, "_warned", False)
    monkeypatch.setattr(jax_private, "_has_transposed", False)
    tx, w = ringjax.allreduce_grads(), jnp.ones(3)
    wrap = jax.jit if jit else lambda f: f

    def update(loss) -> str:
        grads = wrap(jax.grad(loss))(w)
        wrap(lambda g: tx.update(g, tx.init(w), w, weight=2)[0])(grads)
        return capfd.readouterr().err

    assert update(lambda w: jnp.sum(w**2)) == ""
    found = update(lambda w: jnp.sum((w - ringjax.allreduce(w)) ** 2))
    assert ("ringjax.weighted_loss" in found) == (world.rank == 0 and world.size > 1)
    assert update(lambda w: jnp.sum((w - ringjax.allreduce(w)) ** 2)) == ""


def test_values_that_are_no_loss_are_refused(world) -> None:
    with pytest.raises(ValueError, match=r"`loss` is float64\[3\], expected one"):
        ringjax.weighted_loss(jnp.ones(3), 1)
    with pytest.raises(ValueError, match=r"`loss` is int64\[\], expected one"):
        ringjax.weighted_loss(1, 1)
    with pytest.raises(ValueError, match=r"weighted_loss: `weight` is -1"):
        ringjax.weighted_loss(1.0, -1)
