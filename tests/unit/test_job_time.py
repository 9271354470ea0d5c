"""Tests of goodput: how reports of ranks and events of the launcher become shares.

Each test is a made-up job of few seconds, with the arithmetic in its comments.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.monitor.job_time import LOST, PROGRESS, JobTime, format_goodput
from ringjax.monitor.metrics import format_metrics, time_metrics
from ringjax.monitor.time_report import Progress, TimeReport, parse_time_report


def report(age: float, **parts: Any) -> TimeReport:
    return TimeReport(age=age, trains=True, **parts)


def shares_of(time: JobTime, now: float) -> dict[str, float]:
    """Returns the parts of a job in rank-seconds; they sum to its time x ranks."""
    shares = time.shares(now)
    assert sum(shares.values()) == pytest.approx(1.0)
    return shares


def test_a_job_without_steps_has_no_shares() -> None:
    time = JobTime(2, 0.0)
    assert time.shares(1.0) == {}
    time.change_members([0, 1], 1.0)
    time.add_report(0, TimeReport(age=1.0, start=1.0), 2.0)
    assert time.shares(3.0) == {}


def test_each_part_of_a_static_job() -> None:
    """Two ranks, 10 s. Before second 1 no rank was a member, so 2 of 20 are start."""
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 1.0)
    ends = {"end": 0.5, "last": True}
    time.add_report(0, report(9.0, start=1.0, compile=1.0, waiting=2.0, **ends), 10.0)
    time.add_report(1, report(9.0, start=1.0, compile=1.0, other=1.0, **ends), 10.0)
    for rank in range(2):
        time.end_process(rank, 10.0, how="finished")
    shares = shares_of(time, 10.0)
    assert shares["start"] == pytest.approx((2 + 1 + 1) / 20)
    assert shares["compile"] == pytest.approx(2 / 20)
    assert shares["stragglers"] == pytest.approx(2 / 20)
    assert shares["other"] == pytest.approx(1 / 20)
    assert shares["end"] == pytest.approx(1 / 20)
    assert shares[PROGRESS] == pytest.approx((20 - 4 - 2 - 2 - 1 - 1) / 20)


@pytest.mark.parametrize(
    ("own", "part"), [("checkpoints", "checkpoints"), ("recompile", "compile")]
)
def test_waiting_for_what_another_rank_does_is_not_for_a_straggler(
    own: str, part: str
) -> None:
    """Rank 0 does something for 3 s. Of rank 1's 4 s of waiting, 3 are for it."""
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 0.0)
    time.add_report(0, report(10.0, **{own: 3.0}), 10.0)
    time.add_report(1, report(10.0, waiting=4.0), 10.0)
    shares = shares_of(time, 10.0)
    assert shares[part] == pytest.approx((3 + 3) / 20)
    assert shares["stragglers"] == pytest.approx(1 / 20)


def test_checkpoints_before_a_rank_joined_explain_none_of_its_waits() -> None:
    time = JobTime(2, 0.0)
    time.change_members([0], 0.0)
    time.add_report(0, report(4.0, checkpoints=3.0), 4.0)
    time.change_members([0, 1], 4.0)
    time.add_report(0, report(10.0, checkpoints=3.0), 10.0)
    time.add_report(1, report(6.0, waiting=2.0), 10.0)
    assert shares_of(time, 10.0)["stragglers"] == pytest.approx(2 / 20)


def test_a_lost_rank_and_its_successor() -> None:
    """Three ranks, 20 s. The place of rank 2 is empty for 2 s, and joins for 5 s."""
    time = JobTime(3, 0.0)
    time.change_members([0, 1, 2], 0.0)
    time.end_process(2, 8.0)
    time.change_members([0, 1], 8.1)
    time.add_process(3, 10.0)  # 8 to 10: an empty place
    time.change_members([0, 1, 3], 14.0)  # 10 to 14: a process that is no member yet
    for rank in range(2):  # the survivors wait 1 s for the repair, 1 s for the state
        time.add_report(rank, report(20.0, losses=1.0, joins=1.0, waiting=0.5), 20.0)
    time.add_report(3, report(6.0, start=1.5), 20.0)  # of it 0.5 s after the state
    time.add_report(2, report(7.0, waiting=0.25), 7.0)  # it did not see the newcomer
    shares = shares_of(time, 20.0)
    assert shares["losses"] == pytest.approx((2 + 1 + 1) / 60)
    # Both survivors have waited until the newcomer was in step, which is no straggler.
    assert shares["joins"] == pytest.approx((4 + 1.5 + 1 + 1 + 0.5 + 0.5) / 60)
    assert shares["stragglers"] == pytest.approx(0.25 / 60)
    assert shares["start"] == 0


def test_a_rank_that_was_killed_before_its_first_report_has_started_as_others() -> None:
    """Rank 1 starts for 1 of its 3 s. Then its place is empty for 7 s."""
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 0.0)
    time.end_process(1, 3.0)
    time.change_members([0], 3.0)
    time.add_report(0, report(10.0, start=0.5, compile=0.5), 10.0)
    shares = shares_of(time, 10.0)
    assert shares["start"] == pytest.approx((0.5 + 1) / 20)
    assert shares["losses"] == pytest.approx(7 / 20)


def test_a_place_that_stays_empty_is_lost_time() -> None:
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 0.0)
    time.end_process(1, 5.0)
    time.change_members([0], 5.0)
    time.add_report(0, report(10.0), 10.0)
    time.add_report(1, report(5.0), 5.0)
    shares = shares_of(time, 10.0)
    assert shares["losses"] == pytest.approx(5 / 20)
    assert shares[PROGRESS] == pytest.approx(15 / 20)


def test_a_rank_that_left_as_asked_is_not_wanted_any_more() -> None:
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 0.0)
    time.end_process(1, 5.0, how="left")
    time.change_members([0], 5.0)
    time.add_report(0, report(10.0), 10.0)
    time.add_report(1, report(5.0, last=True), 5.0)
    assert shares_of(time, 10.0)[PROGRESS] == pytest.approx(1.0)


def test_a_frozen_rank_does_not_train_until_it_is_declared_lost() -> None:
    """Rank 1 freezes in second 4. In second 7 rank 0 continues without it."""
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 0.0)
    for rank in range(2):
        time.add_report(rank, report(3.0), 3.0)
    time.change_members([0], 7.0)
    time.add_report(0, report(8.0, losses=3.0), 8.0)
    time.end_process(1, 9.0)
    time.add_report(0, report(10.0, losses=3.0), 10.0)
    shares = shares_of(time, 10.0)
    assert shares["losses"] == pytest.approx((3 + 3 + 3) / 20)
    assert shares[PROGRESS] == pytest.approx((7 + 4) / 20)


def test_a_rank_may_leave_its_epoch_before_its_process_ends() -> None:
    time = JobTime(2, 0.0)
    time.change_members([0, 1], 0.0)
    time.change_members([0], 5.0)
    for _ in range(2):  # an agent may tell the end twice
        time.end_process(1, 6.0, how="left")
    time.add_report(0, report(10.0), 10.0)
    time.add_report(1, report(5.0, last=True), 5.0)
    # 10 + 5 s of progress, and one second between the epoch and the end of rank 1.
    assert shares_of(time, 10.0)["losses"] == pytest.approx(1 / 16)


def test_a_launcher_that_takes_over_counts_from_then_on() -> None:
    """The ranks have run for 1000 s. In 10 more seconds, rank 0 waits for 2 s."""
    time = JobTime(1, 0.0)
    time.change_members([0], 1.0)
    time.add_report(0, report(1000.0, start=50.0, waiting=100.0), 2.0)
    time.add_report(0, report(1008.0, start=50.0, waiting=102.0), 10.0)
    shares = shares_of(time, 11.0)
    assert shares["stragglers"] == pytest.approx(2 / 11)
    assert shares["start"] == pytest.approx(1 / 11)  # until the launcher found it


def test_ranks_without_a_coordinator_are_members_since_their_report_says() -> None:
    """Ranks of JAX's own collectives. Their first 2 s of 10 are no membership."""
    time = JobTime(2, 0.0)
    for rank in range(2):
        time.add_report(rank, report(3.0, start=1.0), 5.0)
    for rank in range(2):
        time.add_report(rank, report(8.0, start=1.0), 10.0)
    shares = shares_of(time, 10.0)
    assert shares["start"] == pytest.approx((2 * 2 + 2 * 1) / 20)
    assert shares[PROGRESS] == pytest.approx(14 / 20)


def test_a_second_init_in_one_process_continues_its_sums() -> None:
    time = JobTime(1, 0.0)
    time.change_members([0], 0.0)
    time.add_report(0, report(4.0, compile=1.0), 4.0)
    time.add_report(0, report(5.0, compile=2.0), 10.0)
    time.add_report(0, report(1.0, recompile=1.0), 11.0)  # a new count begins
    assert shares_of(time, 12.0)["compile"] == pytest.approx(3 / 12)


def test_reports_that_claim_too_much_are_scaled() -> None:
    time = JobTime(1, 0.0)
    time.change_members([0], 0.0)
    time.add_report(0, report(10.0, start=30.0, waiting=10.0), 10.0)
    shares = shares_of(time, 10.0)
    assert shares[PROGRESS] == 0 and shares["start"] == pytest.approx(0.75)


@given(st.lists(st.floats(0, 1e6), min_size=len(LOST) + 1, max_size=len(LOST) + 1))
def test_the_line_sums_to_100_percent(seconds: list[float]) -> None:
    whole = sum(seconds) or 1.0
    parts = zip((PROGRESS, *LOST), (s / whole for s in seconds), strict=True)
    shares = dict(parts) if sum(seconds) else {PROGRESS: 1.0}
    line = format_goodput(shares, 3725)
    assert line.startswith("goodput ") and " of 1 h 2 min" in line
    numbers = [word for word, unit in zip(line.split(), line.split()[1:], strict=False)
               if unit.startswith("%")]  # fmt: skip
    assert sum(map(float, numbers)) == pytest.approx(100.0, abs=0.01)


def test_metrics_have_each_part() -> None:
    text = format_metrics(time_metrics({PROGRESS: 0.75, "start": 0.25}))
    assert "ringjax_goodput_ratio 0.75" in text
    assert 'ringjax_lost_time_ratio{part="start"} 0.25' in text
    assert format_metrics(time_metrics({})) == ""


def test_reports_pass_through_their_text() -> None:
    told = report(3.5, waiting=1.25, progress=Progress(2, 8, {"loss": 0.5}))
    assert parse_time_report(told.text()) == told


MALFORMED = (
    *("{", "[]", '{"time":3}', '{"time":{"age":"x"}}', '{"time":{"start":1e999}}'),
    *('{"time":{"progress":{"step":-1}}}', '{"time":{"progress":7}}'),
    *('{"time":{"progress":{"metrics":[1]}}}', '{"time":' + "[" * 100_000),
)
NAMES = st.sampled_from([each.name for each in fields(TimeReport)])
VALUES = st.none() | st.booleans() | st.floats() | st.text() | st.integers()


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_reports_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time_report(text)


@given(st.dictionaries(NAMES, VALUES | st.dictionaries(st.text(), VALUES)))
def test_any_value_is_read_or_refused(value: dict[str, Any]) -> None:
    time = JobTime(1, 0.0)
    with contextlib.suppress(ValueError):
        time.add_report(0, parse_time_report(json.dumps({"time": value})), 1.0)
        assert sum(time.shares(2.0).values()) in (0, pytest.approx(1.0))
