"""Handwritten digits from a Spark DataFrame: a PyTorch estimator trains and predicts.

    spark-submit spark_torch.py       on a cluster
    python spark_torch.py             on this machine

The images are those of `torch_digits.py`, as vectors. Each of two ranks reads its share
of the rows from Parquet files in the store, and the fitted model adds a column of
predictions.
Needs ``pip install "ringjax[spark,torch,examples]"`` and a Java runtime.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch.nn import functional

from ringjax.spark.common.store import Store
from ringjax.spark.torch import TorchEstimator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--store", default=tempfile.mkdtemp(), help="for all executors")
    options = parser.parse_args()

    spark = SparkSession.builder.appName("digits").getOrCreate()
    digits = load_digits()
    rows = zip(digits.data / 16, digits.target, strict=True)
    frame = spark.createDataFrame(
        [(Vectors.dense(image), float(digit)) for image, digit in rows],
        ["image", "digit"],
    )
    train, test = frame.randomSplit([0.8, 0.2], seed=0)

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    estimator = TorchEstimator(
        num_proc=options.ranks,
        store=Store.create(options.store),
        model=model,
        # The estimator multiplies the learning rate by the number of ranks.
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        # The estimator passes all columns as float32.
        loss=lambda output, digit: functional.cross_entropy(output, digit.long()),
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.1,
        batch_size=16,
        epochs=options.epochs,
    )
    fitted = estimator.fit(train)
    predictions = fitted.setOutputCols(["scores"]).transform(test).collect()
    right = sum(row.scores.toArray().argmax() == row.digit for row in predictions)
    print(f"{right / len(predictions):.1%} of {len(predictions)} images")
    spark.stop()


if __name__ == "__main__":
    main()
