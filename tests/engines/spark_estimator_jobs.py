"""Spark estimators: data in Parquet files, real training on ranks, models that predict.

What needs no Spark has ranks of `ringjax.run`, and Parquet files of pyarrow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="Spark's extra is not installed")
pytest.importorskip("pyspark", reason="Spark's extra is not installed")
import pyarrow.parquet as pq  # noqa: E402

import ringjax  # noqa: E402
from ringjax.spark.common.backend import Backend  # noqa: E402
from ringjax.spark.common.rows import Rows, decoded  # noqa: E402
from ringjax.spark.common.store import Store  # noqa: E402

pytestmark = [
    pytest.mark.timeout(180),
    # Of Spark, and of what it is used with.
    pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ROWS = 101


class Here(Backend):
    """Ranks on this machine, without Spark."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        both = {**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}
        return ringjax.run(fn, args, kwargs or {}, np=self.size, env=both)

    def num_processes(self) -> int:
        return self.size


def table(rows: int = ROWS, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 2))
    return pa.table(
        {
            "features": pa.array(features.tolist()),
            "y": (features.prod(1) < 0).astype(np.float64),
            "weight": random.random(rows),
            "number": np.arange(rows),
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Training data in three files with row groups of 13 rows, and 20 for validation."""
    found = Store.create(str(tmp_path / "a store"))
    for path, whole, files in (
        (found.get_train_data_path(), table(), 3),
        (found.get_val_data_path(), table(20, 1), 1),
    ):
        folder = Path(found.get_localized_path(path))
        folder.mkdir(parents=True)
        each = -(-len(whole) // files)
        for n in range(files):
            part = whole.slice(n * each, each)
            pq.write_table(part, folder / f"{n}.parquet", row_group_size=13)
    return found


def numbers(rows: Rows, rank: int, size: int, batch: int = 8, **how: Any) -> list[Any]:
    batches = rows.batches(rank, size, batch, **how)
    return [(b.columns["number"].tolist() if b.rows else [], b.share) for b in batches]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("how", [{}, {"seed": 1}, {"seed": 1, "epoch": 1, "buffer": 5}])
def test_every_row_goes_to_one_rank(store: Any, size: int, how: dict[str, Any]) -> None:
    rows = Rows.of(store, store.get_train_data_path(), ["number"])
    assert rows.count == ROWS
    mine = [numbers(rows, rank, size, **how) for rank in range(size)]
    counts = [sum(len(batch) for batch, _ in steps) for steps in mine]
    assert sorted(n for steps in mine for batch, _ in steps for n in batch) == list(
        range(ROWS)
    )
    assert max(counts) - min(counts) <= 1
    assert {len(steps) for steps in mine} == {rows.steps(size, 8)}
    for step in zip(*mine, strict=True):
        total = sum(len(batch) for batch, _ in step)
        assert [s for _, s in step] == [size * len(batch) / total for batch, _ in step]


def test_the_order_of_rows(store: Any) -> None:
    rows = Rows.of(store, store.get_train_data_path(), ["number"])

    def order(**how: Any) -> list[int]:
        return [n for batch, _ in numbers(rows, 0, 1, **how) for n in batch]

    assert order() == list(range(ROWS)) == order(seed=1, buffer=0)
    assert order(seed=1) == order(seed=1) != order(seed=1, epoch=1)
    near = order(seed=1, buffer=1)  # the row groups only
    assert near != list(range(ROWS)) and sorted(near) == list(range(ROWS))


def test_too_few_rows(store: Any) -> None:
    rows = Rows.of(store, store.get_val_data_path(), ["number"])
    with pytest.raises(ValueError, match="20 rows are too few for 21 ranks"):
        next(rows.batches(0, 21, 1))


def test_rows_are_read_piece_by_piece(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank opens the files of its own rows only, and decodes a group once at most."""
    from ringjax.spark.common import rows as module

    seen: list[int] = []
    real = module.decoded

    def noted(array: Any, name: str) -> Any:
        seen.append(len(array))
        return real(array, name)

    monkeypatch.setattr(module, "decoded", noted)
    rows = Rows.of(store, store.get_train_data_path(), ["number"], keep=True)
    batches = rows.batches(1, 4, 4)
    next(batches)
    assert seen == [1, 8]  # of rows 25 to 50; the second file begins with 34
    list(batches)
    assert seen == [1, 8, 13, 3]
    list(rows.batches(1, 4, 4))
    assert seen == [1, 8, 13, 3]  # it was kept


def vectors(*rows: Any) -> Any:
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    names = ("type", "size", "indices", "values")
    return pa.array([dict(zip(names, row, strict=True)) for row in rows], kind)


DENSE, SPARSE = (1, None, None, [1.0, 0.0, 2.0]), (0, 3, [0, 2], [3.0, 4.0])


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, 2], pa.int32()), [1, 2]),
        (pa.array([True, False]), [True, False]),
        (pa.array([[[1, 2]], [[3, 4]]]), [[[1, 2]], [[3, 4]]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)), [[1, 2], [3, 4]]),
        (vectors(DENSE, DENSE), [[1, 0, 2], [1, 0, 2]]),
        (vectors(SPARSE, DENSE), [[3, 0, 4], [1, 0, 2]]),
        (
            vectors(DENSE, SPARSE, (0, 3, [], []), DENSE).slice(1),
            [[3, 0, 4], [0, 0, 0], [1, 0, 2]],
        ),
    ],
)
def test_columns(array: Any, expected: Any) -> None:
    found = decoded(array)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "array", [pa.array([[1], [1, 2]]), vectors(SPARSE, (0, 4, [0], [1.0]))]
)
def test_rows_of_different_lengths(array: Any) -> None:
    with pytest.raises(ValueError, match=r"column x: rows have \d to \d values"):
        decoded(array, "x")


# -- training: two ranks give what one process gives -----------------------------------

COMMON: dict[str, Any] = {
    "feature_cols": ["features"],
    "label_cols": ["y"],
    "sample_weight_col": "weight",
    "random_seed": 3,
    "verbose": 0,
}


def torch_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1), torch.nn.Sigmoid()
    )


def right(output: Any, label: Any) -> Any:
    return ((output > 0.5) == (label > 0.5)) * 1.0


def torch_estimator(store: Any, **params: Any) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from ringjax.spark.torch import TorchEstimator

    model = torch_model()
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss": torch.nn.functional.binary_cross_entropy,
        "metrics": [right],
        "input_shapes": [[2]],
    }
    return TorchEstimator(store=store, **{**COMMON, **given, **params})


def test_torch_steps_are_those_of_one_process(store: Any) -> None:
    """Each step's gradient is the mean over the rows of both ranks, the last one's, too."""
    estimator = torch_estimator(
        store, backend=Here(2), batch_size=8, epochs=2, validation=0.2
    )
    model = estimator.fit_on_parquet()
    import torch

    # The same in one process: the batches of both ranks, and twice the learning rate.
    alone = torch_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.2, momentum=0.9)
    names = ["features", "y", "weight"]
    rows = Rows.of(store, store.get_train_data_path(), names)
    losses = []
    for epoch in range(2):
        total = 0.0
        both = [rows.batches(rank, 2, 8, seed=3, epoch=epoch) for rank in (0, 1)]
        for parts in zip(*both, strict=True):
            x, y, w = (
                torch.tensor(
                    np.concatenate([b.columns[name][: b.rows] for b in parts]),
                    dtype=torch.float32,
                )
                for name in names
            )
            loss = torch.nn.functional.binary_cross_entropy(
                alone(x)[:, 0], y, reduction="none"
            )
            mean = (loss * w).mean()
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            total += mean.item() * len(y)
        losses.append(total / ROWS)
    history = model.getHistory()
    np.testing.assert_allclose([e["train"]["loss"] for e in history], losses, rtol=1e-5)
    assert [e["epoch"] for e in history] == [0, 1]
    for found, expected in zip(
        model.getModel().parameters(), alone.parameters(), strict=True
    ):
        np.testing.assert_allclose(found.detach(), expected.detach(), atol=1e-6)
    # And what was judged is what the model of the end says.
    val = table(20, 1)
    with torch.no_grad():
        x = torch.tensor(val["features"].to_pylist(), dtype=torch.float32)
        y = torch.tensor(val["y"].to_numpy(), dtype=torch.float32)
        output = alone(x)[:, 0]
    judged = history[-1]["validation"]["all_metrics"][0]["group_0_y"]
    assert judged == pytest.approx(float(right(output, y).mean()))
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.1)


def flax_model() -> Any:
    from flax import nnx

    class Model(nnx.Module):  # of this module, so it travels by value
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(2, 8, rngs=rngs)
            self.second = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.tanh(self.first(x)))

    return Model(nnx.Rngs(0))


def flax_estimator(store: Any, **params: Any) -> Any:
    pytest.importorskip("flax", reason="Flax is not installed")
    import optax

    from ringjax.spark.jax import FlaxEstimator

    given = {
        "model": flax_model(),
        "optimizer": optax.adam(0.01),
        "loss": optax.sigmoid_binary_cross_entropy,
        "metrics": [lambda output, label: (output > 0) == (label > 0.5)],
    }
    return FlaxEstimator(store=store, **{**COMMON, **given, **params})


def keras_estimator(store: Any, **params: Any) -> Any:
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    from ringjax.spark.keras import KerasEstimator

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(1, "sigmoid")]
    )
    size = params["backend"].num_processes()
    given = {
        "model": model,
        # The learning rate that Adam gets is the same for any number of ranks.
        "optimizer": keras.optimizers.Adam(0.01 / size),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy"],
    }
    return KerasEstimator(store=store, **{**COMMON, **given, **params})


def weights(model: Any) -> list[Any]:
    if hasattr(model, "get_weights"):
        return list(model.get_weights())
    import jax
    from flax import nnx

    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("make", [flax_estimator, keras_estimator])
def test_two_ranks_are_like_one(store: Any, make: Callable[..., Any]) -> None:
    """An epoch is one step of all 101 rows, 51 and 50 of them on two ranks."""
    models = []
    for size, batch in ((1, 101), (2, 51)):
        how = {"backend": Here(size), "batch_size": batch, "epochs": 3}
        estimator = make(store, **how, validation=0.2, val_batch_size=20 // size)
        models.append(estimator.fit_on_parquet())
    one, two = (model.getHistory() for model in models)
    if isinstance(one, list):
        one, two = ({k: [e[k]["loss"] for e in h] for k in ("train", "validation")} for h in (one, two))
    else:
        one, two = ({k: h[k] for k in ("loss", "val_loss")} for h in (one, two))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4)
        assert len(one[name]) == 3
    for a, b in zip(*(weights(m.getModel()) for m in models), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("make", [torch_estimator, flax_estimator, keras_estimator])
def test_a_run_goes_on_from_its_checkpoint(
    store: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs and one more are three; three more are six."""
    how = {"backend": Here(2), "batch_size": 8}

    def epochs(model: Any) -> int:
        history = model.getHistory()
        return len(history if isinstance(history, list) else history["loss"])

    whole = make(store, run_id="whole", epochs=3, **how).fit_on_parquet()
    make(store, run_id="parts", epochs=2, **how).fit_on_parquet()
    assert store.exists(store.get_checkpoint_path("parts") + "/checkpoint")
    parts = make(store, run_id="parts", epochs=3, **how).fit_on_parquet()
    assert epochs(whole) == epochs(parts) == 3
    if hasattr(whole.getModel(), "state_dict"):
        pairs = zip(*(m.getModel().parameters() for m in (whole, parts)), strict=True)
        pairs = ((a.detach(), b.detach()) for a, b in pairs)
    else:
        pairs = zip(*(weights(m.getModel()) for m in (whole, parts)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-6)
    again = make(store, run_id="parts", epochs=3, **how).fit_on_parquet()
    assert epochs(again) == 6
