"""Spark estimators: two ranks train like one process, and a run can be continued.

Without Spark: `ringjax.run` starts the ranks, and pyarrow writes the Parquet files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.estimators import (
    LocalBackend,
    flax_estimator,
    is_correct,
    keras_estimator,
    torch_estimator,
    torch_model,
    weights,
)
from engines.local_spark import MARKS
from engines.parquet_data import ROWS, stored, table

from ringjax.spark.common.parquet_rows import ParquetRows

pytestmark = MARKS


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return stored(tmp_path)


def test_torch_steps_are_those_of_one_process(store: Any) -> None:
    """Gradients are the mean over the rows of both ranks, also in a short last step."""
    estimator = torch_estimator(
        store, backend=LocalBackend(2), batch_size=8, epochs=2, validation=0.2
    )
    model = estimator.fit_on_parquet()
    import torch

    # The reference: this process trains on the batches of both ranks with twice the
    # learning rate.
    alone = torch_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.2, momentum=0.9)
    names = ["features", "y", "weight"]
    rows = ParquetRows.scan(store, store.get_train_data_path(), names)
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
    # The validation measures the final model.
    val = table(20, 1)
    with torch.no_grad():
        x = torch.tensor(val["features"].to_pylist(), dtype=torch.float32)
        y = torch.tensor(val["y"].to_numpy(), dtype=torch.float32)
        output = alone(x)[:, 0]
    judged = history[-1]["validation"]["all_metrics"][0]["group_0_y"]
    assert judged == pytest.approx(float(is_correct(output, y).mean()))
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("make", [flax_estimator, keras_estimator])
def test_two_ranks_train_like_one_process(store: Any, make: Callable[..., Any]) -> None:
    """Each epoch is one step with all 101 rows; two ranks have 51 and 50 of them."""
    models = []
    for size, batch in ((1, 101), (2, 51)):
        how = {"backend": LocalBackend(size), "batch_size": batch, "epochs": 3}
        estimator = make(store, **how, validation=0.2, val_batch_size=20 // size)
        models.append(estimator.fit_on_parquet())
    one, two = (model.getHistory() for model in models)
    if isinstance(one, list):
        one, two = (
            {k: [e[k]["loss"] for e in h] for k in ("train", "validation")}
            for h in (one, two)
        )
    else:
        one, two = ({k: h[k] for k in ("loss", "val_loss")} for h in (one, two))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4)
        assert len(one[name]) == 3
    for a, b in zip(*(weights(m.getModel()) for m in models), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_keras_validates_on_the_same_rows_each_time(store: Any) -> None:
    """Tests a validation of several steps, and a layer that the program defines."""
    keras = pytest.importorskip("keras", reason="Keras is not installed")

    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2.0

    model = keras.Sequential(
        [keras.Input((2,)), Twice(), keras.layers.Dense(1, "sigmoid")]
    )
    how = {
        "backend": LocalBackend(1),
        "batch_size": 51,
        "epochs": 3,
        "val_batch_size": 8,
    }
    own = {
        "model": model,
        "custom_objects": {"Twice": Twice},
        "sample_weight_col": None,
    }
    fitted = keras_estimator(store, **how, **own, validation=0.2).fit_on_parquet()
    found = table(20, 1)
    outputs = fitted.getModel().predict(np.array(found["features"].to_pylist()))[:, 0]
    expected = np.mean(is_correct(outputs, found["y"].to_numpy()))
    assert fitted.getHistory()["val_accuracy"][-1] == pytest.approx(expected)


@pytest.mark.parametrize("make", [torch_estimator, flax_estimator, keras_estimator])
def test_a_run_continues_from_its_checkpoint(
    store: Any, make: Callable[..., Any]
) -> None:
    """A run of two epochs continues to three; a finished run makes three more."""
    options = {"backend": LocalBackend(2), "batch_size": 8}

    def epochs(model: Any) -> int:
        history = model.getHistory()
        return len(history if isinstance(history, list) else history["loss"])

    whole = make(store, run_id="whole", epochs=3, **options).fit_on_parquet()
    make(store, run_id="parts", epochs=2, **options).fit_on_parquet()
    assert store.exists(store.get_checkpoint_path("parts") + "/checkpoint")
    parts = make(store, run_id="parts", epochs=3, **options).fit_on_parquet()
    assert epochs(whole) == epochs(parts) == 3
    if hasattr(whole.getModel(), "state_dict"):
        pairs = zip(*(m.getModel().parameters() for m in (whole, parts)), strict=True)
        pairs = ((a.detach(), b.detach()) for a, b in pairs)
    else:
        pairs = zip(*(weights(m.getModel()) for m in (whole, parts)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-6)
    again = make(store, run_id="parts", epochs=3, **options).fit_on_parquet()
    assert epochs(again) == 6
