"""Parquet files for the tests of Spark estimators, written without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="Spark's extra is not installed")
import pyarrow.parquet as pq  # noqa: E402

from ringjax.spark.common.store import Store  # noqa: E402

ROWS = 101


def table(rows: int = ROWS, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 2))
    return pa.table(
        {
            "features": pa.array(features.tolist()),
            "y": (features.prod(1) < 0).astype(np.float64),
            "weight": random.random(rows),
            "number": np.arange(rows),
        }
    )


def stored(folder: Path) -> Any:
    """Makes a store: three files with row groups of 13, and 20 validation rows."""
    found = Store.create(str(folder / "a store"))
    for path, whole, files in (
        (found.get_train_data_path(), table(), 3),
        (found.get_val_data_path(), table(20, 1), 1),
    ):
        place = Path(found.get_localized_path(path))
        place.mkdir(parents=True)
        each = -(-len(whole) // files)
        for n in range(files):
            part = whole.slice(n * each, each)
            pq.write_table(part, place / f"{n}.parquet", row_group_size=13)
    return found
