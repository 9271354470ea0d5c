"""Lists of ranks and worker ids in messages, as arithmetic progressions.

Most lists consist of few progressions: all ranks, every eighth rank, all ranks but the
lost one. So the length of a message hardly depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, groupby, starmap
from typing import Any

MOST = 1 << 20  # the numbers in a list
Progressions = list[list[int]]  # [first, count, step] of each progression


def compress(numbers: Iterable[int]) -> Progressions:
    """Returns the progressions [first, count, step] of which a list consists.

    Example:
        >>> compress([0, 1, 2, 3, 5, 6])
        [[0, 4, 1], [5, 2, 1]]
        >>> compress([-1, -1, 7])
        [[-1, 2, 0], [7, 1, 0]]
    """
    found: Progressions = []
    for number in numbers:
        first, count, step = found[-1] if found else (0, 0, 0)
        if count == 1:
            found[-1][1:] = 2, number - first
        elif count > 1 and number == first + count * step:
            found[-1][1] += 1
        else:
            found.append([number, 1, 0])
    return found


def expand(progressions: Iterable[Iterable[Any]]) -> tuple[int, ...]:
    """Returns the list that `compress` was given.

    Equal progressions share one list, because many ranks send the same list. Raises
    ValueError or TypeError if a message that has been received is malformed.

    Example:
        >>> expand([[0, 4, 1], [5, 2, 1]])
        (0, 1, 2, 3, 5, 6)
    """
    return _expand(tuple(tuple(map(int, each)) for each in progressions))


@lru_cache(maxsize=64)
def _expand(progressions: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    if sum(max(count, 0) for _, count, _ in progressions) > MOST:
        raise ValueError(f"a list has more than {MOST} numbers")
    return tuple(chain.from_iterable(starmap(_progression, progressions)))


def _progression(first: int, count: int, step: int) -> Iterable[int]:
    return (first + i * step for i in range(count))


def compress_column(values: Iterable[int]) -> list[Progressions]:
    """Returns the values of a list, and how often each is repeated, both compressed.

    Example:
        >>> compress_column([0, 0, 0, 1, 1, 1, 2, 2, 2])
        [[[0, 3, 1]], [[3, 3, 0]]]
    """
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return [compress(value for value, _ in runs), compress(count for _, count in runs)]


def expand_column(column: Sequence[Iterable[Iterable[Any]]]) -> list[int]:
    """Returns the list that `compress_column` was given. Raises as `expand` does."""
    values, counts = map(expand, column)
    if sum(counts) > MOST:
        raise ValueError(f"a column has more than {MOST} numbers")
    runs = zip(values, counts, strict=True)
    return [value for value, count in runs for _ in range(count)]
