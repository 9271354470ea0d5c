"""Base classes for all frameworks: estimators train models, and models predict."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import pyarrow as pa
from pyspark.ml import Estimator, Model
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType

from ringjax.spark.common.backend import Backend, SparkBackend
from ringjax.spark.common.columns import (
    Metadata,
    Shapes,
    check_shape_compatibility,
    get_spark_df_output_schema,
    to_list,
)
from ringjax.spark.common.params import EstimatorParams, ModelParams
from ringjax.spark.common.params_io import PersistentParams
from ringjax.spark.common.parquet_rows import Array, ParquetRows, decode_column
from ringjax.spark.common.training_data import (
    check_validation,
    get_dataset_properties,
    get_simple_meta_from_parquet,
    prepare_data,
)
from ringjax.spark.common.training_loop import TrainingJob

Predict: TypeAlias = Callable[[Sequence[Array]], list[Array]]
"""Computes the outputs of a model from columns."""

Trained: TypeAlias = tuple[Any, bytes]
"""The history and the last checkpoint of a training."""


class HorovodEstimator(Estimator, EstimatorParams, PersistentParams):
    """Trains a model on a DataFrame; each framework has a subclass.

    Args:
        params: the Params by their names, see `explainParams`.

    Raises:
        TypeError: a Param does not exist.
    """

    _run_prefix = "run"  # the prefix of each run id

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self.setParams(**params)

    # -- the parts of a framework ------------------------------------------------------

    def _input_shapes(self) -> Shapes | None:
        """Returns the shapes of the model's inputs, if they are known."""
        shapes: Shapes | None = self.getInputShapes()
        return shapes

    @abstractmethod
    def _spec(self) -> dict[str, Any]:
        """Returns the optimizer, the losses and further values for the ranks."""

    @abstractmethod
    def _train_function(self) -> Callable[[TrainingJob, bytes], Trained | None]:
        """Returns the function that each rank calls with the job and a pickled spec."""

    @abstractmethod
    def _create_model(self, checkpoint: bytes, **params: Any) -> Any:
        """Makes the trained model from rank 0's checkpoint and further Params."""

    def _env(self) -> dict[str, str]:
        """Returns environment variables for the ranks."""
        return {} if self.getUseGpu() else {"CUDA_VISIBLE_DEVICES": ""}

    # -- the parts of all frameworks ---------------------------------------------------

    def fit(self, df: DataFrame, params: Any = None) -> Any:
        """Trains on a DataFrame, which is first written to the store.

        Args:
            df: a DataFrame with the columns `feature_cols` and `label_cols`.
            params: values that override this estimator's values.

        Returns:
            The trained model, a transformer.

        Raises:
            ValueError: a Param is missing, or does not fit the columns.
            LaunchError: a rank failed.
        """
        return super().fit(df, params)

    def fit_on_parquet(self, params: Any = None) -> Any:
        """Trains on the Parquet files at the store's `get_train_data_path()`.

        With the Param `validation`, the files at `get_val_data_path()` are for
        validation.
        """
        return (self.copy(params) if params else self)._fit_on_parquet()

    def _fit_on_parquet(self) -> Any:
        backend = self._get_or_create_backend()
        self._check_required()
        found = get_simple_meta_from_parquet(
            self.getStore(),
            self.getLabelCols(),
            self.getFeatureCols(),
            self.getSampleWeightCol(),
            validates=bool(self.getValidation()),
        )
        return self._fit_on_prepared_data(backend, *found)

    def _fit(self, df: DataFrame) -> Any:
        backend = self._get_or_create_backend()
        self._check_required()
        with prepare_data(
            num_processes=backend.num_processes(),
            store=self.getStore(),
            df=df,
            label_columns=self.getLabelCols(),
            feature_columns=self.getFeatureCols(),
            validation=self.getValidation(),
            sample_weight_col=self.getSampleWeightCol(),
            partitions_per_process=self.getPartitionsPerProcess(),
            verbose=self.getVerbose() > 1,
            seed=self.getRandomSeed(),
        ) as number:
            found = get_dataset_properties(number)
            return self._fit_on_prepared_data(backend, *found, number)

    def _check_metadata_compatibility(self, metadata: Metadata) -> None:
        check_shape_compatibility(
            metadata,
            self.getFeatureCols(),
            self.getLabelCols(),
            input_shapes=self._input_shapes(),
            label_shapes=self.getLabelShapes(),
        )

    def _check_required(self) -> None:
        for name in ("model", "store", "feature_cols", "label_cols"):
            if not self.getOrDefault(getattr(self, name)):
                raise ValueError(f"{name} must be given")
        check_validation(self.getValidation())

    def _get_or_create_backend(self) -> Backend:
        backend, size = self.getBackend(), self.getNumProc()
        if backend is None:
            return SparkBackend(size)
        if size is not None:
            raise ValueError("backend and num_proc are both given")
        found: Backend = backend
        return found

    def _fit_on_prepared_data(
        self,
        backend: Backend,
        train_rows: int,
        val_rows: int,
        metadata: Metadata,
        avg_row_size: float,
        dataset_idx: int | None = None,
    ) -> Any:
        if train_rows < backend.num_processes():
            raise ValueError(
                f"{train_rows} rows are too few for {backend.num_processes()} ranks"
            )
        self._check_metadata_compatibility(metadata)
        run_id = self.getRunId() or f"{self._run_prefix}_{time.time_ns() // 1_000_000}"
        job = self._training_job(run_id, val_rows > 0, dataset_idx)
        if self._has_checkpoint(run_id):
            job.checkpoint = self._load_checkpoint(run_id)
        spec = {
            "model": self.getModel(),
            "label_shapes": self.getLabelShapes(),
            "gradient_compression": self.getGradientCompression(),
            **self._spec(),
        }
        results: list[Any] = backend.run(
            self._train_function(),
            args=(job, cloudpickle.dumps(spec)),
            kwargs={},
            env=self._env(),
        )
        history, checkpoint = results[0]
        return self._create_model(
            checkpoint,
            history=history,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            run_id=run_id,
            _metadata=metadata,
        )

    def _spec_by_label(self) -> dict[str, Any]:
        """Returns optimizer, losses and metrics, with a loss for each label."""
        count = len(self.getLabelCols())
        weights = to_list(self.getLossWeights(), count)
        return {
            "optimizer": self.getOptimizer(),
            "loss": to_list(self.getLoss(), count),
            "loss_weights": weights or [1 / count] * count,
            "metrics": [
                group if isinstance(group, list) else [group]
                for group in self.getMetrics() or []
            ],
            "input_shapes": self.getInputShapes(),
        }

    def _training_job(
        self, run_id: str, validates: bool, number: int | None
    ) -> TrainingJob:
        store, seed = self.getStore(), self.getRandomSeed()
        features, labels = self.getFeatureCols(), self.getLabelCols()
        weight = self.getSampleWeightCol()
        names = list(dict.fromkeys([*features, *labels, *([weight] if weight else [])]))
        paths = [store.get_train_data_path(number), store.get_val_data_path(number)]
        rows, *others = [
            ParquetRows.scan(store, path, names, self.getInMemoryCacheAll())
            for path in paths[: 1 + validates]
        ]
        return TrainingJob(
            run_id=run_id,
            store=store,
            rows=rows,
            val_rows=others[0] if others else None,
            features=features,
            labels=labels,
            weight=weight,
            batch_size=self.getBatchSize(),
            val_batch_size=self.getValBatchSize() or self.getBatchSize(),
            steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(),
            epochs=self.getEpochs(),
            seed=secrets.randbits(31) if seed is None else seed,
            seeded=seed is not None,
            shuffle=self.getShuffle(),
            buffer=self.getShufflingBufferSize(),
            transformation=self.getTransformationFn(),
            use_gpu=self.getUseGpu(),
            verbose=self.getVerbose(),
        )

    def _has_checkpoint(self, run_id: str) -> bool:
        folder = self.getStore().get_checkpoint_path(run_id)
        return folder is not None and self.getStore().exists(
            self._checkpoint_file(folder)
        )

    def _load_checkpoint(self, run_id: str) -> bytes:
        store = self.getStore()
        if self.getVerbose():
            print(f"run {run_id} goes on from its checkpoint")
        folder = store.get_checkpoint_path(run_id)
        data: bytes = store.read(self._checkpoint_file(folder))
        return data

    def _checkpoint_file(self, folder: str) -> str:
        return f"{folder}/{self.getStore().get_checkpoint_filename()}"


class HorovodModel(Model, ModelParams, PersistentParams):
    """A trained model, which adds predictions to a DataFrame.

    Args:
        params: the Params by their names, see `explainParams`.
    """

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self.setParams(**params)
        if self.getLabelColumns():
            self.setOutputCols([f"{label}__output" for label in self.getLabelColumns()])

    @abstractmethod
    def _predictor(self) -> Callable[[], Predict]:
        """Returns a function that makes a `Predict` in any process."""

    def transform(self, df: DataFrame, params: Any = None) -> DataFrame:
        """Adds a column with predictions for each label, ``<label>__output``.

        `setOutputCols` sets other names. A prediction has the type of its label, or is
        a vector if it has several values.

        Raises:
            ValueError: a column is missing, or a column for predictions exists.
        """
        return super().transform(df, params)

    def _transform(self, df: DataFrame) -> DataFrame:
        features, labels = self.getFeatureColumns(), self.getLabelColumns()
        names, metadata = self.getOutputCols(), self._get_metadata()
        make = self._predictor()
        # Predict one row here to find out how many values each output has.
        first = df.select(*features).limit(1).toArrow().combine_chunks().to_batches()
        several = [False] * len(labels)
        if first:
            columns = [decode_column(first[0].column(name), name) for name in features]
            several = [output[0].size > 1 for output in make()(columns)]
        schema = get_spark_df_output_schema(df.schema, labels, names, metadata, several)
        kinds = [schema[name].dataType for name in names]
        return df.mapInArrow(_PartitionPredictor(make, features, names, kinds), schema)


@dataclass(frozen=True)
class _PartitionPredictor:
    """Adds predictions to a partition of a DataFrame; Spark calls this object.

    Attributes:
        make: makes the function that predicts, once in a partition.
        features: the columns that are the arguments of this function.
        names, kinds: the names and types of the columns with predictions.
    """

    make: Callable[[], Predict]
    features: Sequence[str]
    names: Sequence[str]
    kinds: Sequence[DataType]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        predict = None
        for batch in batches:
            if not batch.num_rows:
                continue
            predict = predict or self.make()
            columns = [
                decode_column(batch.column(name), name) for name in self.features
            ]
            arrays = list(batch.columns)
            for kind, output in zip(self.kinds, predict(columns), strict=True):
                arrays.append(encode_output(output.reshape(len(output), -1), kind))
            names = [*batch.schema.names, *self.names]
            yield pa.RecordBatch.from_arrays(arrays, names)


def encode_output(rows: Array, kind: DataType) -> pa.Array:
    """Converts outputs, an array of [rows, values], to an Arrow array of Spark's type.

    Vectors become dense vectors of Spark.
    """
    if not isinstance(kind, VectorUDT):
        from pyspark.sql.pandas.types import to_arrow_type

        target = to_arrow_type(kind)
        values = rows[:, 0]
        if pa.types.is_integer(target):
            values = np.rint(values)
        return pa.array(values).cast(target, safe=False)
    count, width = rows.shape
    values = pa.array(rows.reshape(-1).astype(np.float64))
    offsets = pa.array(np.arange(0, count * width + 1, max(width, 1), dtype=np.int32))
    return pa.StructArray.from_arrays(
        [
            pa.array(np.ones(count, np.int8)),  # type 1 marks a dense vector
            pa.nulls(count, pa.int32()),
            pa.nulls(count, pa.list_(pa.int32())),
            pa.ListArray.from_arrays(offsets, values),
        ],
        ["type", "size", "indices", "values"],
    )
