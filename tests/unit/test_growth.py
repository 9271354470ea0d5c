"""Tests that the leak check of long runs reports only processes that grow."""

from __future__ import annotations

import pytest
from support import growth
from support.growth import GrowthMonitor

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, int]]:
    now: dict[str, dict[int, int]] = {"memory": {}, "fds": {}, "time": {0: 0}}
    commands = {7: "python -m ringjax.run -np 2", 8: "python train.py"}
    monkeypatch.setattr(growth.leaks, "processes", lambda _: commands)
    monkeypatch.setattr(growth.strangers, "memory", lambda _: dict(now["memory"]))
    monkeypatch.setattr(growth.strangers, "descriptors", lambda _: dict(now["fds"]))
    monkeypatch.setattr(growth.time, "monotonic", lambda: float(now["time"][0]))
    return now


def _watch(
    clock: dict[str, dict[int, int]], samples: list[tuple[int, int]], peers: int = 0
) -> GrowthMonitor:
    found = GrowthMonitor("job", peers)
    for memory, fds in samples:
        clock["memory"] = {7: 20 * MIB, 8: memory * MIB}
        clock["fds"] = {7: 30, 8: fds}
        found.take_samples()
        clock["time"][0] += 30
    return found


def test_temporary_memory_is_no_leak(
    clock: dict[str, dict[int, int]],
) -> None:
    # The process is large at its start, and again for a moment later.
    samples = [(400, 90), (100, 40), (300, 80), (100, 41), (180, 60), (102, 44)]
    watched = _watch(clock, samples)
    assert watched.leaks() == []
    assert watched.report() == [
        "ringjax.run: 20.0 -> 20.0 MiB, 30 -> 30 descriptors in 150 s",
        "train.py: 100.0 -> 100.0 MiB, 40 -> 40 descriptors in 150 s",
    ]


@pytest.mark.parametrize(("memory", "fds"), [(10, 0), (0, 3)])
def test_steady_growth_is_a_leak(
    clock: dict[str, dict[int, int]], memory: int, fds: int
) -> None:
    samples = [(100 + memory * i, 40 + fds * i) for i in range(12)]
    (text,) = _watch(clock, samples).leaks()
    assert text.startswith("it has grown: train.py: 1")


def test_new_processes_are_not_judged(
    clock: dict[str, dict[int, int]],
) -> None:
    assert _watch(clock, [(100, 40)]).leaks() == []


@pytest.mark.parametrize(("peers", "grown"), [(0, True), (3, False)])
def test_new_peers_explain_new_descriptors(
    clock: dict[str, dict[int, int]], peers: int, grown: bool
) -> None:
    samples = [(100, 16)] * 3 + [(100, 34)] * 9
    assert bool(_watch(clock, samples, peers).leaks()) == grown
