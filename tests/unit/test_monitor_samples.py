"""Tests of the aggregator of ranks' samples: bad samples, losses, joins, views."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.monitor import locations, report, view
from ringjax.monitor.aggregator import OTHER_SETS, Aggregator, CallTotals
from ringjax.monitor.sample import (
    BUCKETS,
    CollectiveSums,
    Sample,
    parse_sample,
    subtract_sums,
)
from ringjax.world.telemetry_client import estimate_step_seconds, thin_waits


def sample_of(rank: int, size: int, calls: int, epoch: int = 0, **more: Any) -> Sample:
    """Returns a rank's sample after `calls` calls of 1,000 bytes and 1 ms each."""
    histogram = [0] * BUCKETS
    histogram[9] = calls
    one = CollectiveSums(
        calls, 1000 * calls, 0, 1e-3 * calls, 1e-4 * calls, histogram, histogram
    )
    return Sample(
        rank,
        size,
        epoch,
        f"node-{rank % 2}",
        calls,
        1e-3 * calls,
        1e-4 * calls,
        sums={("allreduce", "named", 0): one},
        **more,
    )


def test_a_sample_is_parsed_as_it_was_sent() -> None:
    sent = sample_of(1, 2, 7, 3, waits=[(1, 5, 90), (0, 6, 0)], place='a "b"\n')
    sent.memory, sent.step, sent.exposed, sent.faults = 1 << 40, 0.25, 1e-9, 3
    received = parse_sample(sent.text())
    assert received.place == 'a "b"?'  # safe to print on a terminal
    sent.place = received.place
    assert received == sent
    assert "\n" not in sent.text()


GOOD = json.loads(sample_of(0, 2, 3, waits=[(1, 5, 90)]).text())


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": -1},
        {"rank": True},
        {"rank": "0"},
        {"size": 1 << 40, "rank": 0},
        {"calls": 1.5},
        {"waiting": -1.0},
        {"waiting": math.inf},
        {"waiting": math.nan},
        {"memory": 1 << 70},
        {"faults": 0.5},
        {"host": 7},
        {"waits": [1, 2]},
        {"waits": [1, 2, "x"]},
        {"waits": {}},
        {"waits": [1.5, 2, 3]},
        {"sums": [[]]},
        {"sums": [1]},
        {"sums": [["allreduce", "named", 0, 1, 1, 0, 0.0, 0.0, [1], [1]]]},
        {"sums": [["psum", 2, *GOOD["sums"][0][2:]]]},
        {"sums": [GOOD["sums"][0]] * 2000},
    ],
)
def test_malformed_samples_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        parse_sample(json.dumps({**GOOD, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000])
def test_samples_must_be_json_objects(text: str) -> None:
    with pytest.raises(ValueError):
        parse_sample(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.sampled_from(sorted(GOOD)),
)
def test_any_value_is_read_or_refused(value: Any, name: str) -> None:
    try:
        aggregator = Aggregator()
        aggregator.add_sample(0, parse_sample(json.dumps({**GOOD, name: value})), 1.0)
        view.make_view(aggregator, aggregator.open_window(1.0), 2.0)
    except ValueError:
        pass


def test_sums_never_decrease() -> None:
    """A worker is lost, a rank passes to another worker, a process calls init again."""
    aggregator = Aggregator()
    aggregator.add_sample(0, sample_of(0, 2, 10), 1.0)
    aggregator.add_sample(1, sample_of(1, 2, 10), 1.0)
    aggregator.add_sample(1, sample_of(1, 2, 15), 2.0)
    aggregator.remove_worker(0)
    aggregator.add_sample(1, sample_of(0, 1, 20, epoch=1), 3.0)
    assert aggregator.sums["allreduce", "named", 0].calls == 30
    assert (
        aggregator.ranks[0].totals.calls == 15
        and aggregator.ranks[1].totals.calls == 15
    )
    # Rank 1 has called init again.
    aggregator.add_sample(1, sample_of(0, 1, 2, epoch=1), 4.0)
    assert aggregator.sums["allreduce", "named", 0].calls == 32
    assert aggregator.ranks[0].totals.calls == 17
    assert sum(aggregator.sums["allreduce", "named", 0].wait) == 32


def test_subtracting_sums() -> None:
    now, before = sample_of(0, 2, 10).sums, sample_of(0, 2, 4).sums
    (one,) = subtract_sums(now, before).values()
    assert (one.calls, one.bytes, one.wait[9]) == (6, 6000, 6)
    assert subtract_sums(now, now) == {}


def test_process_sets_are_bounded() -> None:
    aggregator = Aggregator()
    for number in range(100):
        sums = {("allreduce", "named", number): CollectiveSums(calls=1)}
        aggregator.add_sample(0, Sample(0, 1, sums=sums), float(number))
    assert len(aggregator.sums) == 33
    assert aggregator.sums["allreduce", "named", OTHER_SETS].calls == 68


def test_view_of_a_time_window() -> None:
    aggregator = Aggregator()
    for rank in range(3):
        aggregator.add_sample(rank, sample_of(rank, 3, 1000), 10.0)
    window = aggregator.open_window(10.0)
    for rank in range(3):
        waits = [(1, call, 0 if rank == 2 else 9000) for call in range(100)]
        sent = sample_of(rank, 3, 1100, waits=waits, place="a.py:3 in load", memory=5)
        sent.tuned = "step: 8 MiB" if rank == 0 else ""
        aggregator.add_sample(rank, sent, 11.0)
    seen = view.make_view(aggregator, window, 11.5)
    assert [row.rank for row in seen.rows] == [0, 1, 2]
    assert seen.hosts == 2 and seen.culprit == 2
    row = seen.rows[2]
    assert abs(seen.rate - 100) < 1e-6 and abs(row.waits - 0.1) < 1e-6
    assert (row.last_in, row.memory) == (1.0, 5)
    assert abs(row.late_by - 0.009) < 1e-9 and abs(row.silent - 0.5) < 1e-9
    # 100 calls of 1,000 bytes in 10 ms. Each rank's link transfers 4/3 of the bytes.
    assert abs(seen.busbw / (100_000 * 4 / 3 / 0.01) - 1) < 1e-6
    assert view.view_from_message(json.loads(json.dumps(seen.message()))) == seen
    text = report.format_report(seen)
    assert "<- all wait for it" in text.splitlines()[-1]
    summary = report.format_summary(aggregator, 1.5)
    assert "the slowest was rank 2" in summary and "autotune: step: 8 MiB" in summary
    assert [what for _, what in aggregator.events] == ["autotune: step: 8 MiB"]


@pytest.mark.parametrize(
    ("own", "jax"),
    [
        ("allreduce", "psum"),
        ("allreduce", "pmax"),
        ("allgather", "all_gather"),
        ("reducescatter", "psum_scatter"),
    ],
)
def test_bandwidth_of_jax_collectives_is_that_of_the_own(own: str, jax: str) -> None:
    def bus_bytes(op: str, lane: str, process_set: int = 0) -> float:
        sums = {(op, lane, process_set): CollectiveSums(calls=1, bytes=1200)}
        return CallTotals.of(Sample(0, 3, moving=1.0, sums=sums)).bus_bytes

    assert bus_bytes(jax, "jax") == bus_bytes(own, "compiled") > 0
    assert bus_bytes(jax, "jax", process_set=7) == 0


def test_silent_ranks_are_marked() -> None:
    aggregator = Aggregator()
    window = aggregator.open_window(0.0)
    aggregator.add_sample(0, sample_of(0, 2, 1), 1.0)
    aggregator.add_sample(1, sample_of(1, 2, 1), 20.0)
    text = report.format_report(view.make_view(aggregator, window, 21.0))
    assert "(no news for 20 s)" in text.splitlines()[2]
    assert "no news" not in text.splitlines()[3]


def test_samples_of_older_epochs_are_ignored() -> None:
    aggregator = Aggregator()
    aggregator.add_sample(0, sample_of(0, 2, 1, epoch=4), 1.0)
    aggregator.add_sample(7, sample_of(1, 3, 1, epoch=3), 1.0)
    assert aggregator.size == 2 and list(aggregator.members()) == [0]


def test_all_ranks_keep_the_same_calls() -> None:
    calls = [(0, number, 1) for number in range(1000)]
    one, other = thin_waits(calls[:700], 256), thin_waits(calls[100:], 256)
    assert 100 < len(one) <= 256 and 100 < len(other) <= 256
    common = {number for _, number, _ in one} & {number for _, number, _ in other}
    assert len(common) > 100
    same = [(1, 5, 1)] * 1000
    assert len(thin_waits(same, 256)) <= 256


def test_the_step_duration_is_estimated_from_calls() -> None:
    def call(name: str, when: float) -> dict[str, Any]:
        known = {"lane": "named", "set": 0, "op": "allreduce", "bytes": 4}
        return {**known, "name": name, "entered": when}

    steps = [
        call(f"layer {layer}", 0.1 * number + 0.001 * layer)
        for number in range(50)
        for layer in range(3)
    ]
    rare = [call("commit", 1.0), call("commit", 4.0)]
    assert abs(estimate_step_seconds(steps + rare) - 0.1) < 1e-6
    assert (
        estimate_step_seconds([]) == 0
        and estimate_step_seconds([call("once", 1.0)]) == 0
    )


def test_totals_are_estimated_from_some_of_the_calls() -> None:
    """Samples list a quarter of the calls. A late rank costs 3 % of the time."""
    aggregator = Aggregator()
    window = aggregator.open_window(0.0)
    for rank in range(3):
        waits = [(1, 4 * call, 0 if rank == 1 else 300) for call in range(100)]
        aggregator.add_sample(
            rank, sample_of(rank, 3, 400, waits=waits, part=0.25), 0.1
        )
    assert abs(aggregator.ranks[1].lost - 400 * 300e-6) < 1e-9
    assert view.make_view(aggregator, window, 4.0).culprit == 1
    for seen in aggregator.workers.values():
        seen.sample.part = 1.0
    assert view.make_view(aggregator, window, 4.0).culprit is None


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 100)), max_size=7)
)
def test_a_ranks_location_exceeds_the_median_most(
    spent: list[dict[str, int]],
) -> None:
    sent = {r: "|".join(f"{n} {p}" for p, n in s.items()) for r, s in enumerate(spent)}
    found = locations.distinctive_locations(sent)
    for rank, mine in enumerate(spent):
        others = [one for r, one in enumerate(spent) if r != rank]

        def more(place: str, mine: Any = mine, others: Any = others) -> float:
            theirs = [one.get(place, 0) for one in others]
            return float(mine[place] - statistics.median(theirs or [0]))

        if not mine:
            assert found[rank] == ""
        else:
            assert more(found[rank]) >= max(map(more, mine)) - 1e-6


def test_silence_is_measured_beyond_the_sampling_interval() -> None:
    aggregator = Aggregator()
    window = aggregator.open_window(0.0)
    aggregator.add_sample(0, sample_of(0, 1, 1), 1.0)
    assert view.make_view(aggregator, window, 9.0, every=8.0).rows[0].silent == 0.0
    assert view.make_view(aggregator, window, 20.0, every=8.0).rows[0].silent == 11.0
