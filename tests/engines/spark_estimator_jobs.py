"""Spark estimators: data in Parquet files, real training on ranks, models that predict.

What needs no Spark has ranks of `ringjax.run`, and Parquet files of pyarrow.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Keras loads TensorFlow if it is there, which may not be beside PyTorch.
os.environ.setdefault("KERAS_BACKEND", "jax")
sys.modules["tensorflow"] = None  # type: ignore[assignment]

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="Spark's extra is not installed")
from engines.local_spark import local_spark
from engines.parquet_data import ROWS, stored, table

import ringjax
from ringjax.spark.common.backend import Backend
from ringjax.spark.common.rows import Rows
from ringjax.spark.common.store import Store

pytestmark = [
    pytest.mark.timeout(180),
    # Of Spark, and of what it is used with.
    pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


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


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return stored(tmp_path)


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
        torch.nn.Linear(2, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 1),
        torch.nn.Sigmoid(),
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
    """A step's gradient is the mean over the rows of both ranks, even of the last."""
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
    """In several steps, with a layer of the program's own."""
    keras = pytest.importorskip("keras", reason="Keras is not installed")

    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2.0

    model = keras.Sequential(
        [keras.Input((2,)), Twice(), keras.layers.Dense(1, "sigmoid")]
    )
    how = {"backend": Here(1), "batch_size": 51, "epochs": 3, "val_batch_size": 8}
    own = {
        "model": model,
        "custom_objects": {"Twice": Twice},
        "sample_weight_col": None,
    }
    fitted = keras_estimator(store, **how, **own, validation=0.2).fit_on_parquet()
    found = table(20, 1)
    outputs = fitted.getModel().predict(np.array(found["features"].to_pylist()))[:, 0]
    expected = np.mean(right(outputs, found["y"].to_numpy()))
    assert fitted.getHistory()["val_accuracy"][-1] == pytest.approx(expected)


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


# -- DataFrames ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    if shutil.which("java") is None:
        pytest.skip("Spark needs a Java runtime")
    with local_spark("local[2]") as session:
        yield session


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Vectors, every second one a sparse one."""
    from pyspark.ml.linalg import Vectors

    rows = []
    for row in table().to_pylist():
        values = row["features"]
        sparse = Vectors.sparse(2, dict(enumerate(values)))
        row["features"] = sparse if row["number"] % 2 else Vectors.dense(values)
        row["val"] = row["number"] % 5 == 0
        rows.append(row)
    return spark.createDataFrame(rows).coalesce(2)


def test_fit_and_transform(frame: Any, tmp_path: Path) -> None:
    """By Spark's tasks, with a validation column; the model says what it said."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    store = Store.create(str(tmp_path / "store"))
    how: dict[str, Any] = {"num_proc": 2, "batch_size": 16, "epochs": 2}
    estimator = torch_estimator(store, **how, validation="val")
    model = estimator.fit(frame)
    history = model.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1]
    assert 0 < history[1]["validation"]["loss"] < 1
    assert store.exists(f"{store.get_checkpoint_path(model.getRunId())}/checkpoint")
    written = Rows.of(store, store.get_train_data_path(0), ["y"])
    validated = Rows.of(store, store.get_val_data_path(0), ["y"])
    assert (written.count, validated.count) == (80, 21)

    out = model.setOutputCols(["p"]).transform(frame)
    assert dict(out.dtypes)["p"] == "double"
    rows = out.orderBy("number").collect()
    features = torch.tensor(table()["features"].to_pylist(), dtype=torch.float32)
    with torch.no_grad():
        expected = model.getModel()(features)[:, 0]
    np.testing.assert_allclose([row.p for row in rows], expected, rtol=1e-5)
    assert rows[1].features.toArray().tolist() == table()["features"][1].as_py()

    # The same DataFrame is not written again; other Params are given for one fit.
    file = Path(store.get_localized_path(store.get_train_data_path(0)), "_SUCCESS")
    before = file.stat().st_mtime_ns
    again = estimator.fit(frame, {estimator.epochs: 1})
    assert len(again.getHistory()) == 1 and estimator.getEpochs() == 2
    assert file.stat().st_mtime_ns == before


def test_save_and_load(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel

    estimator = torch_estimator(None, run_id="run", epochs=7)
    estimator.write().overwrite().save(str(tmp_path / "estimator"))
    loaded = type(estimator).load(str(tmp_path / "estimator"))
    assert (loaded.uid, loaded.getEpochs(), loaded.getRunId()) == (
        *(estimator.uid, 7, "run"),
    )
    assert loaded.getStore() is None
    pipeline = Pipeline(stages=[estimator])
    pipeline.save(str(tmp_path / "pipeline"))
    assert Pipeline.load(str(tmp_path / "pipeline")).getStages()[0].getEpochs() == 7

    from ringjax.spark.torch import TorchModel

    model = TorchModel(
        model=torch_model(),
        feature_columns=["features"],
        label_columns=["y"],
        history=[{"epoch": 0}],
    )
    stages = PipelineModel(stages=[model])
    stages.save(str(tmp_path / "model"))
    back = PipelineModel.load(str(tmp_path / "model")).stages[0]
    assert back.getHistory() == [{"epoch": 0}]
    assert back.getOutputCols() == ["y__output"]
    pairs = zip(
        model.getModel().parameters(), back.getModel().parameters(), strict=True
    )
    assert all((a == b).all() for a, b in pairs)


@pytest.mark.parametrize("make", [flax_estimator, keras_estimator])
def test_models_predict(
    store: Any, frame: Any, tmp_path: Path, make: Callable[..., Any]
) -> None:
    how = {"backend": Here(1), "batch_size": 51, "epochs": 1}
    model = make(store, **how, sample_weight_col=None).fit_on_parquet()
    model.save(str(tmp_path / "model"))
    loaded = type(model).load(str(tmp_path / "model"))
    rows = loaded.transform(frame).orderBy("number").collect()
    features = np.array(table()["features"].to_pylist(), np.float32)
    whole = model.getModel()
    expected = whole.predict(features) if hasattr(whole, "predict") else whole(features)
    found = [row.y__output for row in rows]
    np.testing.assert_allclose(found, np.asarray(expected)[:, 0], rtol=1e-4)


def test_several_values_are_a_vector(frame: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from pyspark.ml.linalg import DenseVector

    from ringjax.spark.common import util
    from ringjax.spark.torch import TorchModel

    model = TorchModel(
        model=torch.nn.Linear(2, 3),
        feature_columns=["features"],
        label_columns=["y"],
        input_shapes=[[-1, 2]],
        _metadata=util._get_metadata(frame.drop("val")),
    )
    row = model.transform(frame).head()
    assert isinstance(row.y__output, DenseVector) and len(row.y__output) == 3


def test_what_is_wrong_is_said_before_anything_starts(
    frame: Any, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    one = {"backend": Here(1)}
    for params, message in (
        ({**one, "feature_cols": ["none"]}, "no column none; there are"),
        ({**one, "validation": "none"}, "no column none"),
        ({**one, "validation": 1.5}, "expected a fraction below 1"),
        ({**one, "input_shapes": [[3]]}, "column features has 2 values in a row"),
        ({**one, "num_proc": 2}, "both given"),
        ({"backend": Here(102)}, "101 rows are too few for 102 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            torch_estimator(store, **params).fit(frame)
    with pytest.raises(TypeError, match="no Param batchsize"):
        torch_estimator(store, batchsize=3)


def test_columns_of_a_frame(frame: Any) -> None:
    from pyspark.ml.linalg import DenseVector, SparseVector

    from ringjax.spark.common import constants, util

    types, shapes, sizes = util._get_col_info(frame)
    assert types["features"] == {DenseVector, SparseVector}
    assert (shapes["features"], sizes["features"], shapes["y"]) == (2, 2, 1)
    found = util._get_metadata(frame.select("features"))["features"]
    assert found["intermediate_format"] == constants.ARRAY
    schema = util.get_spark_df_output_schema(
        frame.schema, ["y"], ["p"], util._get_metadata(frame.select("y"))
    )
    assert schema["p"].dataType == schema["y"].dataType
    train, val, part = util._train_val_split(frame, "val")
    assert (train.count(), val.count()) == (80, 21) and "val" not in train.columns
    assert util._train_val_split(frame, 0.2)[2] == 0.2
    assert part == 0.0
