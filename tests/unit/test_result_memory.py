"""Memory of large results: used again when nothing refers to it, and never before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ringjax.eager import result_memory
from ringjax.eager.result_memory import empty

FLOAT = np.dtype(np.float32)
LARGE = (1 << 18, 2)  # 2 MiB


@pytest.fixture(autouse=True)
def no_free_blocks() -> Iterator[None]:
    result_memory._free.clear()
    yield
    result_memory._free.clear()


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 5), LARGE, (1 << 18, 3)])
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.complex128, bool])
def test_an_array_like_that_of_numpy(shape: tuple[int, ...], dtype: type) -> None:
    array = empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = 1
    assert (array == 1).all()


def test_the_memory_is_used_again_when_the_array_is_gone() -> None:
    first = empty(LARGE, FLOAT)
    second = empty(LARGE, FLOAT)
    places = {address(first), address(second)}
    assert len(places) == 2
    del first, second
    assert {address(a) for a in [empty(LARGE, FLOAT), empty(LARGE, FLOAT)]} == places
    other = empty((1 << 19, 2), FLOAT)
    assert address(other) not in places


def test_what_is_derived_from_an_array_keeps_its_memory() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    for derive in (
        lambda a: a[5:, 1],
        lambda a: a.view(np.int32).T[1][3:],
        lambda a: memoryview(a),
        lambda a: a.flat,
        lambda a: torch.from_numpy(a).view(-1)[7:],
        lambda a: np.from_dlpack(a),
    ):
        array = empty(LARGE, FLOAT)
        place = address(array)
        derived = derive(array)
        del array
        gc.collect()
        assert address(empty(LARGE, FLOAT)) != place
        del derived
        gc.collect()
        assert place in {address(a) for a in [empty(LARGE, FLOAT) for _ in range(2)]}


def test_the_free_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "_MOST_FREE", 5 << 20)
    arrays = [empty(LARGE, FLOAT) for _ in range(4)]
    places = [address(a) for a in arrays]
    for i in range(4):
        arrays[i] = empty((1,), FLOAT)  # in this order
    assert result_memory.free_bytes() == 4 << 20
    assert [address(a) for a in [empty(LARGE, FLOAT), empty(LARGE, FLOAT)]] == [
        places[3],
        places[2],
    ]
    too_large = empty((3, *LARGE), FLOAT)
    del too_large
    assert result_memory.free_bytes() == 4 << 20


def test_a_held_lock_means_new_memory() -> None:
    array = empty(LARGE, FLOAT)
    del array
    with result_memory._lock:  # by a thread that a forked child does not have
        array = empty(LARGE, FLOAT)
        del array
    assert result_memory.free_bytes() == 2 << 20


def test_threads_never_share_memory() -> None:
    failures: list[int] = []

    def run(number: int) -> None:
        for _ in range(300):
            array = empty(LARGE, FLOAT)
            array[:: 1 << 12] = number
            if not (array[:: 1 << 12] == number).all():
                failures.append(number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
