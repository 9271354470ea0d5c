"""The Params of estimators and models, each with `getX` and `setX`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pyspark.ml.param.shared import HasOutputCols, Param, Params, TypeConverters

# Horovod's accessors whose names do not follow from the names of their Params.
_IRREGULAR = {
    "shuffle_buffer_size": ("ShufflingBufferSize",) * 2,
    "train_reader_num_workers": ("TrainReaderNumWorker",) * 2,
    "val_reader_num_workers": ("ValReaderNumWorker",) * 2,
    "inmemory_cache_all": ("InMemoryCacheAll",) * 2,
    "label_columns": ("LabelColumns", "LabelColoumns"),
    "num_gpus": ("NumGPUs",) * 2,
}


def _param(name: str, doc: str, converter: Callable[[Any], Any] | None = None) -> Param:
    return Param(Params._dummy(), name, doc, typeConverter=converter)


class ParamAccessors(Params):
    """Adds `getX` and `setX` for each Param of a class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the accessors, and a signature that lists the Params."""
        super().__init_subclass__(**kwargs)
        names = sorted(n for n in dir(cls) if isinstance(getattr(cls, n, None), Param))
        for name in names:
            if name.startswith("_") or name == "outputCols":
                continue
            regular = name.title().replace("_", "")
            get, put = _IRREGULAR.get(name, (regular, regular))
            getter, setter = _getter(name), _setter(name)
            for accessor, function in (
                (f"get{regular}", getter),
                (f"get{get}", getter),
                (f"set{regular}", setter),
                (f"set{put}", setter),
            ):
                if not hasattr(cls, accessor):
                    setattr(cls, accessor, function)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(n, kind, default=None) for n in names]
        cls.__signature__ = inspect.Signature(parameters)

    def setParams(self, **params: Any) -> Any:  # noqa: N802  (Spark ML's name)
        """Sets Params by their names; returns this object.

        Raises:
            TypeError: a Param does not exist.
        """
        unknown = sorted(name for name in params if not self.hasParam(name))
        if unknown:
            name = type(self).__name__
            raise TypeError(f"{name} has no Param {', '.join(unknown)}")
        return self._set(**params)


def _getter(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(getattr(self, name))

    get.__doc__ = f"Returns the value of `{name}`."
    return get


def _setter(name: str) -> Callable[[Any, Any], Any]:
    def put(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    put.__doc__ = f"Sets `{name}`; returns this object."
    return put


class EstimatorParams(ParamAccessors):
    """The Params of all estimators; the `getX` of a Param returns its value."""

    num_proc = _param("num_proc", "how many ranks")
    backend = _param("backend", "runs the ranks, instead of num_proc")
    store = _param("store", "where data and checkpoints are kept")
    model = _param("model", "the model that is trained")
    optimizer = _param("optimizer", "the optimizer")
    loss = _param("loss", "a loss, or one for each label")
    loss_weights = _param(
        "loss_weights", "the weight of each loss", TypeConverters.toListFloat
    )
    metrics = _param("metrics", "functions whose means over an epoch are reported")
    feature_cols = _param(
        "feature_cols", "columns, one for each input", TypeConverters.toListString
    )
    label_cols = _param(
        "label_cols", "columns, one for each output", TypeConverters.toListString
    )
    sample_weight_col = _param(
        "sample_weight_col", "a column with weights", TypeConverters.toString
    )
    validation = _param(
        "validation", "a fraction of the rows, or a column that is 1 in them"
    )
    batch_size = _param("batch_size", "rows of a rank's step", TypeConverters.toInt)
    val_batch_size = _param(
        "val_batch_size", "rows of a rank's step in validation", TypeConverters.toInt
    )
    epochs = _param("epochs", "passes over the data", TypeConverters.toInt)
    train_steps_per_epoch = _param(
        "train_steps_per_epoch", "steps, instead of all rows", TypeConverters.toInt
    )
    validation_steps_per_epoch = _param(
        "validation_steps_per_epoch",
        "steps in validation, instead of all rows",
        TypeConverters.toInt,
    )
    random_seed = _param(
        "random_seed", "makes the training repeatable", TypeConverters.toInt
    )
    shuffle = _param("shuffle", "whether rows are shuffled", TypeConverters.toBoolean)
    shuffle_buffer_size = _param(
        "shuffle_buffer_size", "rows that are shuffled together", TypeConverters.toInt
    )
    partitions_per_process = _param(
        "partitions_per_process", "Parquet files for a rank", TypeConverters.toInt
    )
    run_id = _param(
        "run_id", "an existing run goes on from its checkpoint", TypeConverters.toString
    )
    transformation_fn = _param("transformation_fn", "changes the columns of a batch")
    gradient_compression = _param(
        "gradient_compression", "how gradients are compressed"
    )
    label_shapes = _param("label_shapes", "the shape of each label")
    inmemory_cache_all = _param(
        "inmemory_cache_all", "keeps rows in memory", TypeConverters.toBoolean
    )
    use_gpu = _param("use_gpu", "whether ranks use GPUs", TypeConverters.toBoolean)
    verbose = _param("verbose", "whether rank 0 prints epochs", TypeConverters.toInt)
    callbacks = _param("callbacks", "Keras's callbacks")
    # Params of Horovod that ringjax does not need, for example for Petastorm.
    data_module = _param("data_module", "without effect")
    compress_sparse_cols = _param("compress_sparse_cols", "without effect")
    transformation_edit_fields = _param("transformation_edit_fields", "without effect")
    transformation_removed_fields = _param(
        "transformation_removed_fields", "without effect"
    )
    train_reader_num_workers = _param("train_reader_num_workers", "without effect")
    val_reader_num_workers = _param("val_reader_num_workers", "without effect")
    reader_pool_type = _param("reader_pool_type", "without effect")
    mp_start_method = _param("mp_start_method", "without effect")

    def __init__(self) -> None:
        super().__init__()
        nothing = dict.fromkeys(param.name for param in self.params)
        self._setDefault(**nothing)
        self._setDefault(
            metrics=[],
            callbacks=[],
            batch_size=32,
            epochs=1,
            verbose=1,
            shuffle=True,
            partitions_per_process=10,
            inmemory_cache_all=False,
            use_gpu=True,
            compress_sparse_cols=False,
        )


class ModelParams(HasOutputCols, ParamAccessors):
    """The Params of all models."""

    history = _param("history", "what was measured in each epoch")
    model = _param("model", "the trained model")
    feature_columns = _param("feature_columns", "columns, one for each input")
    label_columns = _param("label_columns", "columns, one for each output")
    run_id = _param("run_id", "the run that trained it", TypeConverters.toString)
    _metadata = _param("_metadata", "types and shapes of the columns")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**dict.fromkeys(p.name for p in self.params))

    def setOutputCols(self, value: list[str]) -> Any:  # noqa: N802  (Spark ML's name)
        """Sets the names of the columns with predictions; returns this object."""
        return self._set(outputCols=value)

    def _get_metadata(self) -> Any:
        return self.getOrDefault(self._metadata)
