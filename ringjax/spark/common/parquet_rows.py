"""A rank's rows of a set of Parquet files, in batches, read row group by row group.

What is in memory are a piece of a row group and the rows that are shuffled. Nothing of
Spark is imported: ranks use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ringjax.spark.common.store import FilesystemStore

Columns = dict[str, np.ndarray[Any, Any]]
_CHUNK = 32 << 20  # bytes that are decoded at once
_SHUFFLED = 256 << 20  # bytes among which is shuffled, if nobody says how many rows


@dataclass(frozen=True)
class RowGroup:
    """A row group: its file, its number there, its rows, and their bytes."""

    path: str
    number: int
    rows: int
    size: int


@dataclass(frozen=True)
class Batch:
    """Rows of one step.

    Attributes:
        columns: arrays whose first dimension are the rows.
        rows: how many of them count: all, or none.
        share: what the mean over these rows is to be multiplied by, so that the mean
            over the ranks is the mean over all ranks' rows of that step. Not 1 in the
            last step of an epoch only, if the ranks have different numbers of rows.
    """

    columns: Columns
    rows: int
    share: float


@dataclass
class ParquetRows:
    """The rows of Parquet files, and which of them a rank gets.

    Attributes:
        store: has the filesystem.
        groups: all row groups, in order.
        names: the columns.
        keep: whether a rank keeps its decoded rows in memory.
    """

    store: FilesystemStore
    groups: Sequence[RowGroup]
    names: Sequence[str]
    keep: bool = False
    _kept: dict[tuple[str, int, int, int], list[Columns]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, store: FilesystemStore, path: str, names: Sequence[str], keep: bool = False
    ) -> ParquetRows:
        """The rows below a path of a store; reads the ends of all files."""
        groups = [
            RowGroup(fragment.path, group.id, group.num_rows, group.total_byte_size)
            for fragment in store.get_parquet_dataset(path).get_fragments()
            for group in fragment.row_groups
            if group.num_rows
        ]
        return cls(store, groups, list(names), keep)

    @property
    def count(self) -> int:
        """All rows."""
        return sum(group.rows for group in self.groups)

    @property
    def row_size(self) -> float:
        """The bytes of a row in its file, before they were compressed."""
        return max(sum(group.size for group in self.groups) / max(self.count, 1), 1.0)

    def share(self, rank: int, size: int) -> tuple[int, int]:
        """A rank's first row, and the one behind its last: sizes differ by one."""
        return self.count * rank // size, self.count * (rank + 1) // size

    def steps(self, size: int, batch_size: int) -> int:
        """The batches of an epoch, the same for all ranks."""
        most = -(-self.count // size)
        return -(-most // batch_size)

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
        """A rank's batches of one epoch; every rank has as many.

        Args:
            rank, size: who reads.
            batch_size: rows of a batch; the last one may be shorter.
            seed: shuffles, with another order in each epoch; None: the files' order.
            epoch: its number.
            buffer: rows among which is shuffled, beside the order of the row groups.

        Raises:
            ValueError: there are fewer rows than ranks.
        """
        if self.count < size:
            raise ValueError(f"{self.count} rows are too few for {size} ranks")
        groups = list(self.groups)
        chunks: Iterator[Columns]
        first, end = self.share(rank, size)
        if seed is not None and buffer != 0:
            # The same order of row groups on all ranks, so that their shares fit.
            order = np.random.default_rng([seed, epoch]).permutation(len(groups))
            groups = [groups[i] for i in order]
            own = np.random.default_rng([seed, epoch, rank])
            room = buffer or max(int(_SHUFFLED / self.row_size), batch_size)
            chunks = _shuffle(self._chunks(groups, first, end), room, own)
        else:
            chunks = self._chunks(groups, first, end)
        counts = np.diff([self.share(r, size)[0] for r in range(size)] + [self.count])
        pieces = _rebatch(chunks, batch_size)
        for step in range(self.steps(size, batch_size)):
            there = np.clip(counts - step * batch_size, 0, batch_size)
            mine = int(there[rank])
            if mine:
                columns = next(pieces)
            else:  # a row is computed that does not count
                columns = {name: x[:1] for name, x in columns.items()}
            yield Batch(columns, mine, size * mine / int(there.sum()))

    def _chunks(
        self, groups: Sequence[RowGroup], first: int, end: int
    ) -> Iterator[Columns]:
        """Rows `first` to `end` of the groups in this order, decoded piece by piece."""
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
        self, file: Any, group: RowGroup, low: int, high: int
    ) -> Iterator[Columns]:
        rows = min(max(int(_CHUNK * group.rows / max(group.size, 1)), 1), 1 << 16)
        begin = 0
        for piece in file.iter_batches(
            rows, row_groups=[group.number], columns=list(self.names)
        ):
            part = piece.slice(max(low - begin, 0), max(high - max(begin, low), 0))
            begin += piece.num_rows
            if part.num_rows:
                yield {
                    name: decode_column(part.column(name), name) for name in self.names
                }
            if begin >= high:
                return


def _shuffle(
    chunks: Iterator[Columns], room: int, random: np.random.Generator
) -> Iterator[Columns]:
    """The rows in a random order, as far as it can be had with `room` in memory."""
    pool: Columns = {}
    for chunk in chunks:
        both = _concatenate([pool, chunk] if pool else [chunk])
        order = random.permutation(_row_count(both))
        ready = max(len(order) - room, 0)
        pool = {name: x[order[ready:]] for name, x in both.items()}
        if ready:
            yield {name: x[order[:ready]] for name, x in both.items()}
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
        joined = _concatenate(rest)
        for begin in range(0, count - size + 1, size):
            yield {name: x[begin : begin + size] for name, x in joined.items()}
        rest = [{name: x[count - count % size :] for name, x in joined.items()}]
        count %= size
    if count:
        yield _concatenate(rest)


def _concatenate(chunks: Sequence[Columns]) -> Columns:
    if len(chunks) == 1:
        return chunks[0]
    return {n: np.concatenate([chunk[n] for chunk in chunks]) for n in chunks[0]}


def _row_count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def decode_column(array: Any, name: str = "a column") -> np.ndarray[Any, Any]:
    """An Arrow array as one of NumPy, with a dimension more for each level of lists.

    Args:
        array: numbers; lists of equal lengths; Spark's vectors, dense and sparse ones;
            anything else becomes objects.
        name: for the error.

    Raises:
        ValueError: the rows differ in length.

    Example:
        >>> import pyarrow as pa
        >>> decode_column(pa.array([[1, 2], [3, 4]])).tolist()
        [[1, 2], [3, 4]]
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return decode_column(array.storage, name)
    if pa.types.is_struct(kind) and {f.name for f in kind} == {
        *("type", "size", "indices", "values")
    }:
        return _decode_vectors(array, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _decode_lists(array, name)
    if pa.types.is_fixed_size_list(kind):
        values = decode_column(array.flatten(), name)
        return values.reshape(len(array), kind.list_size, *values.shape[1:])
    found: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return found


def _decode_lists(array: Any, name: str) -> np.ndarray[Any, Any]:
    _common_length(array.value_lengths().to_numpy(zero_copy_only=False), name)
    values = decode_column(array.flatten(), name)
    return values.reshape(len(array), -1, *values.shape[1:])


def _decode_vectors(array: Any, name: str) -> np.ndarray[Any, Any]:
    dense = array.field("type").to_numpy(zero_copy_only=False) == 1
    lists = array.field("values")
    counts = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    values: np.ndarray[Any, Any] = lists.flatten().to_numpy(zero_copy_only=False)
    sizes = np.nan_to_num(array.field("size").to_numpy(zero_copy_only=False))
    width = _common_length(np.where(dense, counts, sizes), name)
    if dense.all():
        return values.reshape(len(array), width)
    # Where each value is in its row: one after the other, or where the vector says.
    starts = np.cumsum(counts) - counts
    places = np.arange(len(values)) - np.repeat(starts, counts)
    indices = array.field("indices").flatten().to_numpy(zero_copy_only=False)
    places[np.repeat(~dense, counts)] = indices
    found = np.zeros((len(array), width), values.dtype)
    found[np.repeat(np.arange(len(array)), counts), places] = values
    return found


def _common_length(lengths: np.ndarray[Any, Any], name: str) -> int:
    found = np.unique(lengths)
    if len(found) != 1:
        raise ValueError(
            f"column {name}: rows have {found[0]} to {found[-1]} values; expected "
            "equally many in all rows"
        )
    return int(found[0])
