"""Tests of sending a state from a rank to others over links. Ranks are threads."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax import _native, errors, runtime
from ringjax.elastic import leaf, transfer
from ringjax.elastic.transfer import Participants

here = threading.local()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    """Runs a function in a thread for each of five ranks. Ranks 1, 3, 4 have links."""
    chosen = [1, 3, 4]
    world = _native.local_world([0, 0, 0])
    monkeypatch.setattr(runtime, "rank", lambda: here.rank)
    monkeypatch.setattr(runtime, "size", lambda: 5)
    monkeypatch.setattr(runtime, "current", lambda what: SimpleNamespace(secret=b""))

    @contextlib.contextmanager
    def private_communicator(asked):
        assert list(asked) == chosen
        yield world[chosen.index(here.rank)]

    monkeypatch.setattr(
        runtime, "private_communicator", private_communicator, raising=False
    )

    def run(work: Callable[[int], Any]) -> dict[int, Any]:
        found: dict[int, Any] = {}

        def as_rank(rank: int) -> None:
            here.rank = rank
            try:
                with transfer.between(Participants(3, (1, 4))):
                    found[rank] = work(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=as_rank, args=(r,)) for r in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    run.world = world
    yield run
    while world:
        world.pop().close()
    gc.collect()  # frames of caught exceptions refer to communicators


def state(value: float) -> dict[str, Any]:
    rng = np.random.default_rng(int(value))
    return {
        # This array is larger than a chunk, and others cross the border of a chunk.
        "params": {"w": jnp.asarray(rng.random((1531, 1733), np.float32))},
        "many": [np.full(n, value) for n in (0, 1, 1027, 99_991, 1_000_003)],
        "step": int(value),
        "key": jax.random.key(int(value)),
    }


def test_only_source_and_receivers_take_part(ranks) -> None:
    found = ranks(lambda rank: transfer.broadcast_state(state(rank)))
    assert [found[rank] for rank in (0, 2, 3)] == [None] * 3
    for rank in (1, 4):
        got, want = found[rank], state(3)
        assert got["step"] == 3
        assert isinstance(got["params"]["w"], jax.Array)
        for one, two in zip(
            jax.tree.leaves([got["params"], got["many"]]),
            jax.tree.leaves([want["params"], want["many"]]),
            strict=True,
        ):
            np.testing.assert_array_equal(one, two)
        assert jax.random.uniform(got["key"]) == jax.random.uniform(want["key"])


def test_received_memory_is_not_copied() -> None:
    data = transfer.StateEncoder({"x": np.ones(5)}, allow_pickle=False)
    made = transfer.StateDecoder(data.structure, {}, allow_pickle=False)
    made.memory[0][:] = data.memory[0]
    assert made.values()["x"].ctypes.data == made.memory[0].ctypes.data


def test_preallocated_memory_is_used() -> None:
    transfer.preallocate({"x": np.ones(5), "y": np.ones(5), "z": np.ones(6)})
    (spec,) = transfer.StateEncoder({"x": np.ones(5)}, allow_pickle=False).leaves
    rooms = [spec.memory() for _ in range(3)]
    assert len({room.ctypes.data for room in rooms}) == 3
    assert len(leaf._reserved[48]) == 1 and not leaf._reserved[40]
    leaf.release_reserved()
    assert not leaf._reserved


def test_an_unsupported_value_raises_on_both_ends(ranks) -> None:
    found = ranks(lambda rank: transfer.broadcast_state({"f": [object()]}))
    assert isinstance(found[3], TypeError) and "state of rank 3" in str(found[3])
    for rank in (1, 4):
        assert isinstance(found[rank], ValueError)
        assert "state of rank 3 cannot be sent: state.f[0]" in str(found[rank])
    assert found[0] is None and found[2] is None


def test_a_lost_rank_is_named(ranks) -> None:
    def work(rank: int) -> Any:
        if rank == 4:
            for number in range(3):
                ranks.world[number].abort("rank 4 is on fire", 4)
            return None
        return transfer.broadcast_state(state(rank))

    found = ranks(work)
    for rank in (1, 3):
        assert isinstance(found[rank], errors.PeerLost) and found[rank].rank == 4


def test_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 10)
    memory = [np.arange(n, dtype=np.uint8) for n in (3, 0, 7, 25, 1)]
    pieces = list(transfer._chunks(memory))
    assert [sum(map(len, chunk)) for chunk in pieces] == [10, 10, 10, 6]
    together = np.concatenate([piece for chunk in pieces for piece in chunk])
    np.testing.assert_array_equal(together, np.concatenate(memory))


def test_an_empty_state_needs_no_links() -> None:
    assert transfer.broadcast_state({}) is None
