"""The rows of a rank from Parquet files, and stores of such files, without Spark."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.parquet_data import ROWS, stored

pa = pytest.importorskip("pyarrow", reason="Spark's extra is not installed")
from ringjax.spark.common.parquet_rows import ParquetRows, decode_column  # noqa: E402
from ringjax.spark.common.store import (  # noqa: E402
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    Store,
)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return stored(tmp_path)


def numbers(
    rows: ParquetRows, rank: int, size: int, batch: int = 8, **how: Any
) -> list[Any]:
    batches = rows.batches(rank, size, batch, **how)
    return [(b.columns["number"].tolist() if b.rows else [], b.share) for b in batches]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("how", [{}, {"seed": 1}, {"seed": 1, "epoch": 1, "buffer": 5}])
def test_every_row_goes_to_one_rank(store: Any, size: int, how: dict[str, Any]) -> None:
    rows = ParquetRows.scan(store, store.get_train_data_path(), ["number"])
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
    rows = ParquetRows.scan(store, store.get_train_data_path(), ["number"])

    def order(**how: Any) -> list[int]:
        return [n for batch, _ in numbers(rows, 0, 1, **how) for n in batch]

    assert order() == list(range(ROWS)) == order(seed=1, buffer=0)
    assert order(seed=1) == order(seed=1) != order(seed=1, epoch=1)
    near = order(seed=1, buffer=1)  # shuffles row groups only
    assert near != list(range(ROWS)) and sorted(near) == list(range(ROWS))


def test_too_few_rows(store: Any) -> None:
    rows = ParquetRows.scan(store, store.get_val_data_path(), ["number"])
    with pytest.raises(ValueError, match="20 rows are too few for 21 ranks"):
        next(rows.batches(0, 21, 1))


def test_rows_are_read_in_batches(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank opens only the files with its rows, and decodes row groups only once."""
    from ringjax.spark.common import parquet_rows as module

    seen: list[int] = []
    real = module.decode_column

    def record(array: Any, name: str) -> Any:
        seen.append(len(array))
        return real(array, name)

    monkeypatch.setattr(module, "decode_column", record)
    rows = ParquetRows.scan(store, store.get_train_data_path(), ["number"], keep=True)
    batches = rows.batches(1, 4, 4)
    next(batches)
    assert seen == [1, 8]  # rows 25 to 33: the second file begins with row 34
    list(batches)
    assert seen == [1, 8, 13, 3]
    list(rows.batches(1, 4, 4))
    assert seen == [1, 8, 13, 3]  # the decoded rows were kept


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
    found = decode_column(array)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "array", [pa.array([[1], [1, 2]]), vectors(SPARSE, (0, 4, [0], [1.0]))]
)
def test_rows_of_different_lengths(array: Any) -> None:
    with pytest.raises(ValueError, match=r"column x: rows have \d to \d values"):
        decode_column(array, "x")


# -- stores ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "host", "port", "full"),
    [
        ("hdfs://node:8020/user/out", "node", 8020, "hdfs://node:8020/user/out"),
        ("hdfs:///user/out", "default", 0, "hdfs:///user/out"),
        ("/user/out", "default", 0, "hdfs:///user/out"),
    ],
)
def test_a_store_in_hdfs(root: str, host: str, port: int, full: str) -> None:
    found = copy.copy(HDFSStore(root, val_path="/val"))  # ranks receive a copy
    assert (found._hdfs_kwargs["host"], found._hdfs_kwargs["port"]) == (host, port)
    assert found.get_full_path("/user/out") == full
    assert found.get_localized_path(full) == "/user/out"
    assert found.get_train_data_path(3) == f"{full}/intermediate_train_data.3"
    assert found.get_val_data_path() == full.replace("/user/out", "/val")
    assert found.get_checkpoint_path("run") == f"{full}/runs/run"


def test_paths_outside_of_hdfs_are_refused() -> None:
    for path in ("file:///user/out", "hdfs://node:8020"):
        with pytest.raises(ValueError, match="not a folder in HDFS"):
            HDFSStore(path)


@pytest.mark.parametrize("prefix", ["/dbfs/", "dbfs:/", "file:///dbfs/", "file:/dbfs/"])
def test_a_store_in_databricks(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(Store.create("/dbfs/runs")) is FilesystemStore
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.0")
    found = Store.create(f"{prefix}runs")
    assert isinstance(found, DBFSLocalStore)
    assert found.prefix_path == "file:///dbfs/runs"
    with pytest.raises(ValueError, match="not a path below /dbfs"):
        DBFSLocalStore("dbfs://runs")


def test_files_in_a_store(tmp_path: Path) -> None:
    found = Store.create(str(tmp_path))
    file = f"{found.get_run_path('run')}/a.ckpt"
    assert not found.exists(file)
    found.write_text(file, "text")
    assert found.read(file) == b"text"
    assert [Path(f).name for f in found.get_checkpoints("run")] == ["a.ckpt"]
    with found.get_local_output_dir_fn("run")() as folder:
        Path(folder, "b").write_text("b")
        found.sync_fn("run")(folder)
    assert found.read(f"{found.get_run_path('run')}/b") == b"b"
    assert not found.is_parquet_dataset(found.get_train_data_path())


def test_a_filesystem_of_fsspec() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    found = Store.create("memory://here/runs")
    found.write_text("memory://here/runs/file", "text")
    assert found.read("memory://here/runs/file") == b"text"


def test_params_have_accessors() -> None:
    pytest.importorskip("pyspark", reason="Spark's extra is not installed")
    from ringjax.spark.common.params import EstimatorParams, ModelParams

    params = EstimatorParams()
    for name in ("ShufflingBufferSize", "TrainReaderNumWorker", "NumProc", "Epochs"):
        assert getattr(params, f"set{name}")(7) is params
        assert getattr(params, f"get{name}")() == 7
    assert params.setInMemoryCacheAll(True).getInMemoryCacheAll() is True
    assert ModelParams().setLabelColoumns(["y"]).getLabelColumns() == ["y"]
    with pytest.raises(TypeError, match="EstimatorParams has no Param batchsize"):
        params.setParams(batchsize=3)
