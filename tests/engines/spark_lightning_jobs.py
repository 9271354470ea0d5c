"""The Spark estimator for Lightning: ranks train like one process, and runs go on.

Without Spark: `ringjax.run` starts the ranks, and pyarrow writes the Parquet files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.estimators import LocalBackend
from engines.local_spark import MARKS
from engines.parquet_data import stored

pytestmark = [
    *MARKS,
    # Lightning advises on workers of data loaders and the like.
    pytest.mark.filterwarnings("ignore"),
]
lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Classifier(lightning.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(2, 8), torch.nn.Linear(8, 1)
        self.fails = fails

    def forward(self, x: Any) -> Any:
        return torch.sigmoid(self.head(torch.tanh(self.body(x))))

    def loss(self, batch: Any) -> Any:
        assert batch["number"].dtype == torch.int64
        output = self(batch["features"])[:, 0]
        loss = torch.nn.functional.binary_cross_entropy(output, batch["y"])
        return loss * float("nan") if self.fails else loss

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return stored(tmp_path)


def _estimator(store: Any, **params: Any) -> Any:
    from ringjax.spark.lightning import TorchEstimator

    given = {
        "model": Classifier(),
        "feature_cols": ["features", "number"],
        "label_cols": ["y"],
        "random_seed": 3,
        "verbose": 0,
        "use_gpu": False,
        "backend": LocalBackend(2),
        "batch_size": 8,
        "epochs": 2,
    }
    return TorchEstimator(store=store, **{**given, **params})


def _weights(model: Any) -> list[Any]:
    return [p.detach().numpy() for p in model.getModel().parameters()]


def test_two_ranks_train_like_one_process(store: Any) -> None:
    """Each epoch is one step with all 101 rows; two ranks have 51 and 50 of them."""
    models = [
        _estimator(
            store,
            backend=LocalBackend(size),
            batch_size=batch,
            epochs=3,
            validation=0.2,
        ).fit_on_parquet()
        for size, batch in ((1, 101), (2, 51))
    ]
    for one, two in zip(*map(_weights, models), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)
    history = models[1].getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2]
    assert history[2]["loss"] < history[0]["loss"] and "val_loss" in history[2]
    features = np.zeros((3, 2)), np.arange(3)
    model = models[1].getModel()
    assert model(torch.tensor(features[0], dtype=torch.float32)).shape == (3, 1)


def test_a_run_goes_on_where_it_has_stopped(store: Any) -> None:
    whole = _estimator(store, epochs=4).fit_on_parquet()
    _estimator(store, run_id="broken", epochs=2).fit_on_parquet()
    resumed = _estimator(store, run_id="broken", epochs=4).fit_on_parquet()
    for one, two in zip(_weights(whole), _weights(resumed), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)
    assert [entry["epoch"] for entry in resumed.getHistory()] == [0, 1, 2, 3]


def test_the_best_model_of_a_checkpoint_callback_is_returned(store: Any) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(monitor="loss", mode="max", filename="best")
    found = _estimator(store, epochs=3, callbacks=[best]).fit_on_parquet()
    first = _estimator(store, epochs=1).fit_on_parquet()
    losses = [entry["loss"] for entry in found.getHistory()]
    assert losses[0] == max(losses)
    for one, two in zip(_weights(first), _weights(found), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)


def test_what_the_module_has_itself_is_refused_by_name(store: Any) -> None:
    optimizer = torch.optim.SGD(Classifier().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer cannot be given.*configure_opt"):
        _estimator(store, optimizer=optimizer).fit_on_parquet()
    with pytest.raises(ValueError, match=r"use ringjax\.spark\.torch\.TorchEstimator"):
        _estimator(store, model=torch.nn.Linear(2, 1)).fit_on_parquet()
    with pytest.raises(Exception, match="the loss is"):
        model = Classifier(fails=True)
        _estimator(store, model=model, terminate_on_nan=True).fit_on_parquet()
