"""Tests of the native comparison of parameters: hashes, and texts about differences."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ringjax import _native

NAMES = "a\nb/c\n\u00e9 d"


def hash_of(data: bytes | np.ndarray) -> int:
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    (found,) = _native.hash_memory([(array.ctypes.data, array.nbytes)])
    return found


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 128, 200])
def test_the_hash_depends_on_every_bit_and_on_the_length(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    seen = {hash_of(data), hash_of(np.concatenate([data, data[:0], [np.uint8(0)]]))}
    assert len(seen) == 2
    for place in range(size):
        for bit in range(8):
            other = data.copy()
            other[place] ^= 1 << bit
            seen.add(hash_of(other))
    assert len(seen) == 2 + 8 * size


def test_the_hash_depends_on_order_but_not_on_the_address() -> None:
    words = np.arange(64, dtype=np.uint64)
    swapped = {hash_of(np.roll(words, n)) for n in range(64)}
    assert len(swapped) == 64
    room = np.zeros(words.nbytes + 1, np.uint8)
    room[1:] = words.view(np.uint8)
    assert hash_of(room[1:]) == hash_of(words)
    assert len({hash_of(np.zeros(n, np.uint8)) for n in range(300)}) == 300


def differences(hashes: Sequence[Sequence[int]]) -> tuple[set[str], int]:
    """Compares hashes on threads, one for each rank.

    Returns the different texts of the ranks, and the number of exchanges.
    """
    size = len(hashes)
    barrier = threading.Barrier(size)
    given: list[list[int]] = [[]] * size
    said, exchanges = [""] * size, [0] * size

    def rank(r: int) -> None:
        def exchange_maximum(numbers: list[int]) -> list[int]:
            exchanges[r] += 1
            given[r] = numbers
            barrier.wait()
            most = [max(column) for column in zip(*given, strict=True)]
            barrier.wait()
            return most

        members = [10 * m for m in range(size)]
        said[r] = _native.difference(hashes[r], NAMES, members, r, exchange_maximum)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(exchanges)) == 1
    return {text.split(";")[0] for text in said}, exchanges[0]


@pytest.mark.parametrize(
    ("hashes", "text", "exchanges"),
    [
        ([[1, 2, 3]], "", 1),
        ([[1, 2, 3]] * 4, "", 1),
        ([[1, 2, 3], [1, 2, 4]], "'\u00e9 d' of rank 10 is not that of rank 0", 3),
        (
            [[1, 2, 3], [1, 5, 4], [1, 5, 4]],
            "'b/c' of rank 0 is not that of rank 10, the first of 2 that differ",
            3,
        ),
        (
            [[1, 2, 3], [2**64 - 1, 2, 3], [7, 2, 3]],
            "'a' of ranks 10, 20 is not that of rank 0",
            3,
        ),
        (
            [[1, 2, n] for n in range(1, 13)],
            "'\u00e9 d' of ranks 10, 20, 30, 40, 50, 60, 70, 80 and 3 more is not that "
            "of rank 0",
            3,
        ),
    ],
)
def test_all_ranks_print_equal_differences(
    hashes: list[list[int]], text: str, exchanges: int
) -> None:
    assert differences(hashes) == ({text}, exchanges)


def test_a_failed_exchange_is_an_error() -> None:
    def broken(numbers: list[int]) -> list[int]:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        _native.difference([1], "a", [0], 0, broken)
    with pytest.raises(_native.StatusError, match="numbers are missing"):
        _native.difference([1], "a", [0], 0, lambda numbers: numbers[1:])
