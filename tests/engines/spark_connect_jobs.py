"""Jobs and estimators by Spark Connect, where the driver has no SparkContext."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")

from engines import programs
from engines.local_spark import WITH_JAVA, local_spark

import ringjax.spark
from ringjax.errors import LaunchError

pytestmark = WITH_JAVA


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with local_spark("local[2]", connect=True) as session:
        yield session


def test_spark_connect_has_no_spark_context(spark: Any) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException):
        _ = spark.sparkContext


def test_jobs(spark: Any) -> None:
    both = [(0, 2, 0, 6.0), (1, 2, 1, 6.0)]
    assert (
        ringjax.spark.run(programs.allreduce, (2.0,)) == both
    )  # all there is room for
    assert ringjax.spark.Distributor(2).run(programs.allreduce, 2.0) == both[0]
    elastic = ringjax.spark.run_elastic(
        programs.allreduce, (2.0,), num_proc=2, min_num_proc=1
    )
    assert elastic == both


def test_failures(spark: Any) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 \(on .*\): ValueError: boom"):
        ringjax.spark.run(programs.fails, (1, "raise"), num_proc=2)
    with pytest.raises(
        LaunchError, match="0 of 3 have within . s, and there is room for 2"
    ):
        ringjax.spark.run(programs.allreduce, num_proc=3, start_timeout=3)
    assert len(ringjax.spark.run(programs.allreduce, num_proc=2)) == 2


def test_an_estimator(spark: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from ringjax.spark.common.store import Store
    from ringjax.spark.torch import TorchEstimator, TorchModel

    rows = [([float(n % 7), float(n % 3)], float(n % 2), n % 4 == 0) for n in range(40)]
    frame = spark.createDataFrame(rows, ["x", "y", "val"])
    model = torch.nn.Linear(2, 1)
    fitted = TorchEstimator(
        num_proc=2,
        store=Store.create(str(tmp_path / "store")),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        validation="val",
        epochs=2,
    ).fit(frame)
    assert len(fitted.getHistory()) == 2
    assert fitted.getHistory()[1]["validation"]["loss"] > 0
    fitted.save(str(tmp_path / "model"))
    out = TorchModel.load(str(tmp_path / "model")).transform(frame)
    assert out.filter("y__output is not null").count() == 40
