"""What estimators of all frameworks do: from a DataFrame to a model, and back."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
from pyspark.ml import Estimator, Model
from pyspark.ml.linalg import VectorUDT

from ringjax.spark.common.backend import Backend, SparkBackend
from ringjax.spark.common.columns import get_spark_df_output_schema
from ringjax.spark.common.params import EstimatorParams, ModelParams
from ringjax.spark.common.params_io import PersistentParams
from ringjax.spark.common.parquet_rows import ParquetRows, decode_column
from ringjax.spark.common.training_data import (
    Metadata,
    check_validation,
    get_dataset_properties,
    get_simple_meta_from_parquet,
    prepare_data,
)
from ringjax.spark.common.training_loop import TrainingJob

Predict = Callable[[Sequence[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]


class HorovodEstimator(Estimator, EstimatorParams, PersistentParams):
    """Trains a model on a DataFrame; a framework adds what is its own.

    Args:
        params: the Params by their names, see `explainParams`.

    Raises:
        TypeError: there is no such Param.
    """

    _kind = "run"  # what the names of its runs begin with

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self.setParams(**params)

    # What a framework adds.

    def _check_metadata_compatibility(self, metadata: Metadata) -> None:
        """Whether the columns fit to the model."""

    @abstractmethod
    def _spec(self) -> bytes:
        """The model and what is needed to train it, pickled."""

    @abstractmethod
    def _trainer(self) -> Callable[[TrainingJob, bytes], Any]:
        """What each rank calls, with the job and that."""

    @abstractmethod
    def _create_model(self, result: Any, run_id: str, metadata: Metadata) -> Any:
        """The trained model, of what rank 0 returned."""

    def _env(self) -> dict[str, str]:
        """Variables for the ranks."""
        return {} if self.getUseGpu() else {"CUDA_VISIBLE_DEVICES": ""}

    # What all do.

    def fit(self, df: Any, params: Any = None) -> Any:
        """Trains on a DataFrame, which is written to the store first.

        Args:
            df: has the columns `feature_cols` and `label_cols`.
            params: values that stand in for this estimator's.

        Returns:
            The trained model, a transformer.

        Raises:
            ValueError: a Param is missing, or does not fit to the columns.
            LaunchError: a rank failed.
        """
        return super().fit(df, params)

    def fit_on_parquet(self, params: Any = None) -> Any:
        """Trains on Parquet files that are at the store's `get_train_data_path()`.

        Validates on those at `get_val_data_path()`, if `validation` is given.
        """
        return (self.copy(params) if params else self)._fit_on_parquet()

    def _fit_on_parquet(self) -> Any:
        backend = self._get_or_create_backend()
        names = self.getLabelCols(), self.getFeatureCols()
        self._check_given()
        found = get_simple_meta_from_parquet(
            *(self.getStore(), *names, self.getSampleWeightCol()),
            validates=bool(self.getValidation()),
        )
        return self._fit_on_prepared_data(backend, *found)

    def _fit(self, df: Any) -> Any:
        backend = self._get_or_create_backend()
        self._check_given()
        with prepare_data(
            *(backend.num_processes(), self.getStore(), df),
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

    def _check_given(self) -> None:
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
        run_id = self.getRunId() or f"{self._kind}_{time.time_ns() // 1_000_000}"
        job = self._job(run_id, val_rows > 0, dataset_idx)
        if self._has_checkpoint(run_id):
            job.checkpoint = self._load_checkpoint(run_id)
        results = backend.run(
            self._trainer(), args=(job, self._spec()), kwargs={}, env=self._env()
        )
        return self._create_model(results[0], run_id, metadata)

    def _job(self, run_id: str, validates: bool, number: int | None) -> TrainingJob:
        store, seed = self.getStore(), self.getRandomSeed()
        features, labels = self.getFeatureCols(), self.getLabelCols()
        weight = self.getSampleWeightCol()
        names = list(dict.fromkeys([*features, *labels, *([weight] if weight else [])]))
        paths = [store.get_train_data_path(number), store.get_val_data_path(number)]
        rows, *others = [
            ParquetRows.of(store, path, names, self.getInMemoryCacheAll())
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
        return folder is not None and self.getStore().exists(self._checkpoint(folder))

    def _load_checkpoint(self, run_id: str) -> bytes:
        store = self.getStore()
        if self.getVerbose():
            print(f"run {run_id} goes on from its checkpoint")
        data: bytes = store.read(self._checkpoint(store.get_checkpoint_path(run_id)))
        return data

    def _checkpoint(self, folder: str) -> str:
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
        """Makes a function from columns to outputs, in whatever process."""

    def transform(self, df: Any, params: Any = None) -> Any:
        """Adds a column with predictions for each label, ``<label>__output``.

        `setOutputCols` gives other names. A prediction is of its label's type, or a
        vector if it has several values.

        Raises:
            ValueError: a column is missing, or there already.
        """
        return super().transform(df, params)

    def _transform(self, df: Any) -> Any:
        features, labels = self.getFeatureColumns(), self.getLabelColumns()
        names, metadata = self.getOutputCols(), self._get_metadata()
        make = self._predictor()
        # How many values an output has, one row shows.
        first = df.select(*features).limit(1).toArrow().combine_chunks().to_batches()
        several = [False] * len(labels)
        if first:
            outputs = make()(
                [decode_column(first[0].column(name), name) for name in features]
            )
            several = [output[0].size > 1 for output in outputs]
        schema = get_spark_df_output_schema(df.schema, labels, names, metadata, several)
        kinds = [schema[name].dataType for name in names]
        return df.mapInArrow(_PartitionPredictor(make, features, names, kinds), schema)


class _PartitionPredictor:
    """What Spark calls in each partition of a DataFrame: adds the outputs.

    Args:
        make: makes the function that predicts, once in a partition.
        features: its columns.
        names, kinds: columns and types of what it returns.
    """

    def __init__(
        self,
        make: Callable[[], Predict],
        features: Sequence[str],
        names: Sequence[str],
        kinds: Sequence[Any],
    ) -> None:
        self._make, self._features = make, list(features)
        self._names, self._kinds = list(names), list(kinds)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches with more columns."""
        predict = None
        for batch in batches:
            if not batch.num_rows:
                continue
            predict = predict or self._make()
            columns = [
                decode_column(batch.column(name), name) for name in self._features
            ]
            outputs = predict(columns)
            arrays = list(batch.columns)
            for kind, output in zip(self._kinds, outputs, strict=True):
                arrays.append(encode_output(output.reshape(len(output), -1), kind))
            names = [*batch.schema.names, *self._names]
            yield pa.RecordBatch.from_arrays(arrays, names)


def encode_output(rows: np.ndarray[Any, Any], kind: Any) -> pa.Array:
    """Outputs as Arrow's array for a type of Spark, vectors as Spark has them.

    Args:
        rows: an array of [rows, values].
        kind: a type of Spark.
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
    nothing = pa.nulls(count, pa.int32())
    return pa.StructArray.from_arrays(
        [
            pa.array(np.ones(count, np.int8)),
            nothing,
            pa.nulls(count, pa.list_(pa.int32())),
            pa.ListArray.from_arrays(offsets, values),
        ],
        ["type", "size", "indices", "values"],
    )


def pickle_with_classes(**values: Any) -> bytes:
    """Values with their classes, wherever these are defined."""
    data: bytes = cloudpickle.dumps(values)
    return data
