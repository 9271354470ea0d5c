"""Reads a rank's rows of a set of Parquet files in batches, row group by row group.

The memory contains a part of one row group, and the rows that are shuffled together.
Ranks use this module, so it imports nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ringjax.spark.common.store import FilesystemStore

Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = dict[str, Array]
"""Arrays by the names of their columns; the first dimension are the rows."""

_CHUNK_BYTES = 32 << 20  # bytes that are decoded together
_SHUFFLE_BYTES = 256 << 20  # bytes that are shuffled together if no number is given


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file; `size` is in bytes before compression."""

    path: str
    number: int
    rows: int
    size: int


@dataclass(frozen=True)
class Batch:
    """The rows of one step of one rank.

    Attributes:
        columns: the rows.
        rows: the number of rows that count: all rows, or 0 in a placeholder.
        share: the factor of this rank's mean. With these factors, the mean over the
            ranks is the mean over the rows of all ranks. The factor differs from 1 only
            in the last step of an epoch, if the ranks have different numbers of rows.
    """

    columns: Columns
    rows: int
    share: float


@dataclass
class ParquetRows:
    """The rows of a set of Parquet files, and the division of the rows among ranks.

    `names` are the names of the columns. If `keep` is true, a rank keeps its decoded
    rows in memory.
    """

    store: FilesystemStore
    groups: Sequence[RowGroup]
    names: Sequence[str]
    keep: bool = False
    _kept: dict[tuple[str, int, int, int], list[Columns]] = field(default_factory=dict)

    @classmethod
    def scan(
        cls, store: FilesystemStore, path: str, names: Sequence[str], keep: bool = False
    ) -> ParquetRows:
        """Finds the rows below a path of a store; reads the metadata of all files."""
        groups = [
            RowGroup(fragment.path, group.id, group.num_rows, group.total_byte_size)
            for fragment in store.get_parquet_dataset(path).get_fragments()
            for group in fragment.row_groups
            if group.num_rows
        ]
        return cls(store, groups, list(names), keep)

    @property
    def count(self) -> int:
        """The number of rows of all ranks."""
        return sum(group.rows for group in self.groups)

    @property
    def row_size(self) -> float:
        """The mean size of a row in bytes, before compression."""
        return max(sum(group.size for group in self.groups) / max(self.count, 1), 1.0)

    def row_range(self, rank: int, size: int) -> tuple[int, int]:
        """Returns the indices of a rank's first row and of the row after its last row.

        The row counts of two ranks differ by at most one.
        """
        return self.count * rank // size, self.count * (rank + 1) // size

    def steps(self, size: int, batch_size: int) -> int:
        """Returns the number of batches of an epoch, the same for all ranks."""
        max_rows = -(-self.count // size)
        return -(-max_rows // batch_size)

    def batches(
        self,
        rank: int,
        size: int,
        batch_size: int,
        *,
        seed: int | None = None,
        epoch: int = 0,
        buffer: int | None = None,
    ) -> Iterator[Batch]:
        """Yields a rank's batches of one epoch, equally many on every rank.

        Args:
            rank, size: the rank that reads, and the number of ranks.
            batch_size: rows of a batch; the last batch may have fewer.
            seed: the seed of the shuffling; None keeps the order of the files.
            epoch: the index of the epoch; each epoch has another order.
            buffer: the number of rows that are shuffled together, besides the shuffling
                of row groups; 0 keeps the order of the files.
        """
        if self.count < size:
            raise ValueError(f"{self.count} rows are too few for {size} ranks")
        groups = list(self.groups)
        chunks: Iterator[Columns]
        first, end = self.row_range(rank, size)
        if seed is not None and buffer != 0:
            # All ranks shuffle the row groups in the same way, because a rank's range
            # refers to the shuffled order. Rows are shuffled differently on each rank.
            order = np.random.default_rng([seed, epoch]).permutation(len(groups))
            groups = [groups[i] for i in order]
            random = np.random.default_rng([seed, epoch, rank])
            room = buffer or max(int(_SHUFFLE_BYTES / self.row_size), batch_size)
            chunks = _shuffle(self._read(groups, first, end), room, random)
        else:
            chunks = self._read(groups, first, end)
        counts = np.diff(
            [*(self.row_range(r, size)[0] for r in range(size)), self.count]
        )
        batches = _rebatch(chunks, batch_size)
        for step in range(self.steps(size, batch_size)):
            by_rank = np.clip(counts - step * batch_size, 0, batch_size)
            own = int(by_rank[rank])
            if own:
                columns = next(batches)
            else:
                # Other ranks still have a row for this step. All ranks must make the
                # step, so this rank yields a placeholder, a row that does not count.
                columns = {name: x[:1] for name, x in columns.items()}
            yield Batch(columns, own, size * own / int(by_rank.sum()))

    def _read(
        self, groups: Sequence[RowGroup], first: int, end: int
    ) -> Iterator[Columns]:
        """Yields the rows `first` to `end` of the row groups, in decoded parts."""
        begin = 0
        file, path = None, ""
        for group in groups:
            low, high = max(first - begin, 0), min(end - begin, group.rows)
            begin += group.rows
            if low >= high:
                continue
            key = (group.path, group.number, low, high)
            if key in self._kept:
                yield from self._kept[key]
                continue
            if file is None or path != group.path:
                path = group.path
                file = pa.parquet.ParquetFile(self.store.fs.open_input_file(path))
            found = self._read_row_group(file, group, low, high)
            if self.keep:
                self._kept[key] = list(found)
                found = iter(self._kept[key])
            yield from found

    def _read_row_group(
        self, file: pa.parquet.ParquetFile, group: RowGroup, low: int, high: int
    ) -> Iterator[Columns]:
        rows = min(max(int(_CHUNK_BYTES * group.rows / max(group.size, 1)), 1), 1 << 16)
        begin = 0
        for batch in file.iter_batches(
            rows, row_groups=[group.number], columns=list(self.names)
        ):
            part = batch.slice(max(low - begin, 0), max(high - max(begin, low), 0))
            begin += batch.num_rows
            if part.num_rows:
                yield {n: decode_column(part.column(n), n) for n in self.names}
            if begin >= high:
                return


def _shuffle(
    chunks: Iterator[Columns], room: int, random: np.random.Generator
) -> Iterator[Columns]:
    """Yields rows in random order. Each row is chosen among `room` rows in memory."""
    pool: Columns = {}
    for chunk in chunks:
        rows = _concatenate([pool, chunk] if pool else [chunk])
        order = random.permutation(_row_count(rows))
        ready = max(len(order) - room, 0)
        pool = {name: x[order[ready:]] for name, x in rows.items()}
        if ready:
            yield {name: x[order[:ready]] for name, x in rows.items()}
    if pool:
        yield pool


def _rebatch(chunks: Iterator[Columns], size: int) -> Iterator[Columns]:
    rest: list[Columns] = []
    count = 0
    for chunk in chunks:
        rest.append(chunk)
        count += _row_count(chunk)
        if count < size:
            continue
        rows = _concatenate(rest)
        for begin in range(0, count - size + 1, size):
            yield {name: x[begin : begin + size] for name, x in rows.items()}
        rest = [{name: x[count - count % size :] for name, x in rows.items()}]
        count %= size
    if count:
        yield _concatenate(rest)


def _concatenate(chunks: Sequence[Columns]) -> Columns:
    if len(chunks) == 1:
        return chunks[0]
    return {n: np.concatenate([chunk[n] for chunk in chunks]) for n in chunks[0]}


def _row_count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def decode_column(array: pa.Array, name: str = "a column") -> Array:
    """Converts an Arrow array to NumPy, with one more dimension per level of lists.

    The array has numbers, lists of equal lengths, or Spark's dense or sparse vectors.
    Any other values become objects. The error about rows of different lengths names the
    column.

    Example:
        >>> import pyarrow as pa
        >>> decode_column(pa.array([[1, 2], [3, 4]])).tolist()
        [[1, 2], [3, 4]]
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return decode_column(array.storage, name)
    vector_fields = {"type", "size", "indices", "values"}
    if pa.types.is_struct(kind) and {f.name for f in kind} == vector_fields:
        return _decode_vectors(array, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _common_length(array.value_lengths().to_numpy(zero_copy_only=False), name)
        values = decode_column(array.flatten(), name)
        return values.reshape(len(array), -1, *values.shape[1:])
    if pa.types.is_fixed_size_list(kind):
        values = decode_column(array.flatten(), name)
        return values.reshape(len(array), kind.list_size, *values.shape[1:])
    found: Array = array.to_numpy(zero_copy_only=False)
    return found


def _decode_vectors(array: pa.StructArray, name: str) -> Array:
    """Converts Spark's dense and sparse vectors to an array of [rows, values]."""
    dense = array.field("type").to_numpy(zero_copy_only=False) == 1
    lists = array.field("values")
    counts = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    values: Array = lists.flatten().to_numpy(zero_copy_only=False)
    sizes = np.nan_to_num(array.field("size").to_numpy(zero_copy_only=False))
    width = _common_length(np.where(dense, counts, sizes), name)
    if dense.all():
        return values.reshape(len(array), width)
    # The column of a value in the result is its position in a dense vector, and its
    # stored index in a sparse vector.
    starts = np.cumsum(counts) - counts
    positions = np.arange(len(values)) - np.repeat(starts, counts)
    indices = array.field("indices").flatten().to_numpy(zero_copy_only=False)
    positions[np.repeat(~dense, counts)] = indices
    found = np.zeros((len(array), width), values.dtype)
    found[np.repeat(np.arange(len(array)), counts), positions] = values
    return found


def _common_length(lengths: Array, name: str) -> int:
    found = np.unique(lengths)
    if len(found) != 1:
        raise ValueError(
            f"column {name}: rows have {found[0]} to {found[-1]} values; expected "
            "equally many in all rows"
        )
    return int(found[0])
