"""Spark estimators on DataFrames: fit, transform, save, load, and bad arguments."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.estimators import (
    LocalBackend,
    flax_estimator,
    keras_estimator,
    torch_estimator,
    torch_model,
)
from engines.local_spark import MARKS, local_spark
from engines.parquet_data import stored, table

from ringjax.spark.common.parquet_rows import ParquetRows
from ringjax.spark.common.store import Store

pytestmark = MARKS


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return stored(tmp_path)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    if shutil.which("java") is None:
        pytest.skip("Spark needs a Java runtime")
    with local_spark("local[2]") as session:
        yield session


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Returns rows with vectors, every second of which is sparse."""
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
    """Trains in Spark tasks with a validation column, and predicts with the model."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    store = Store.create(str(tmp_path / "store"))
    how: dict[str, Any] = {"num_proc": 2, "batch_size": 16, "epochs": 2}
    estimator = torch_estimator(store, **how, validation="val")
    model = estimator.fit(frame)
    history = model.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1]
    assert 0 < history[1]["validation"]["loss"] < 1
    assert store.exists(f"{store.get_checkpoint_path(model.getRunId())}/checkpoint")
    written = ParquetRows.scan(store, store.get_train_data_path(0), ["y"])
    validated = ParquetRows.scan(store, store.get_val_data_path(0), ["y"])
    assert (written.count, validated.count) == (80, 21)

    out = model.setOutputCols(["p"]).transform(frame)
    assert dict(out.dtypes)["p"] == "double"
    rows = out.orderBy("number").collect()
    features = torch.tensor(table()["features"].to_pylist(), dtype=torch.float32)
    with torch.no_grad():
        expected = model.getModel()(features)[:, 0]
    np.testing.assert_allclose([row.p for row in rows], expected, rtol=1e-5)
    assert rows[1].features.toArray().tolist() == table()["features"][1].as_py()

    # A second fit on the DataFrame writes no files. The Params of `fit` are used once.
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
    how = {"backend": LocalBackend(1), "batch_size": 51, "epochs": 1}
    model = make(store, **how, sample_weight_col=None).fit_on_parquet()
    model.save(str(tmp_path / "model"))
    loaded = type(model).load(str(tmp_path / "model"))
    rows = loaded.transform(frame).orderBy("number").collect()
    features = np.array(table()["features"].to_pylist(), np.float32)
    whole = model.getModel()
    expected = whole.predict(features) if hasattr(whole, "predict") else whole(features)
    found = [row.y__output for row in rows]
    np.testing.assert_allclose(found, np.asarray(expected)[:, 0], rtol=1e-4)


def test_several_outputs_become_a_vector(frame: Any) -> None:
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


def test_bad_arguments_are_refused_before_the_job_starts(
    frame: Any, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    one = {"backend": LocalBackend(1)}
    for params, message in (
        ({**one, "feature_cols": ["none"]}, "no column none; there are"),
        ({**one, "validation": "none"}, "no column none"),
        ({**one, "validation": 1.5}, "expected a fraction below 1"),
        ({**one, "input_shapes": [[3]]}, "column features has 2 values in a row"),
        ({**one, "num_proc": 2}, "both given"),
        ({"backend": LocalBackend(102)}, "101 rows are too few for 102 ranks"),
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
