"""Tests of the time limit of a call: which limit counts, and which values are valid."""

from __future__ import annotations

import math
import threading

import pytest

import ringjax
from ringjax.world import timeouts
from ringjax.world.process_set import ProcessSet
from ringjax.xla import primitive


def test_the_innermost_limit_counts() -> None:
    plain, own = ProcessSet([0]), ProcessSet([0], timeout=5)
    assert (plain.limit(), own.limit()) == (timeouts.JOB_LIMIT, 5.0)
    with ringjax.collective_timeout(30):
        assert (plain.limit(), own.limit()) == (30.0, 30.0)
        with ringjax.collective_timeout(0.5):
            assert own.limit() == 0.5
        assert own.limit() == 30.0
    own.timeout = 0
    assert (plain.limit(), own.limit()) == (timeouts.JOB_LIMIT, 0.0)
    own.timeout = None
    assert own.limit() == timeouts.JOB_LIMIT


def test_a_limit_ends_at_an_exception_and_is_per_thread() -> None:
    seen = []
    with pytest.raises(KeyError), ringjax.collective_timeout(3):
        thread = threading.Thread(
            target=lambda: seen.append(timeouts.current_limit(None))
        )
        thread.start()
        thread.join()
        raise KeyError
    assert seen == [timeouts.JOB_LIMIT]
    assert timeouts.current_limit(None) == timeouts.JOB_LIMIT


@pytest.mark.parametrize("bad", [-1, -0.001, math.nan, "5", b"5", True, [1], object()])
def test_invalid_limits_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        ProcessSet([0], timeout=bad)  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="number of seconds"),
        ringjax.collective_timeout(bad),  # type: ignore[arg-type]
    ):
        pass


def test_none_means_the_jobs_limit_for_process_sets_only() -> None:
    assert ProcessSet([0], timeout=None).timeout is None
    with pytest.raises(ValueError, match="None"), ringjax.collective_timeout(None):  # type: ignore[arg-type]
        pass


def test_infinity_is_no_limit() -> None:
    assert ProcessSet([0], timeout=math.inf).limit() == 0.0


def test_calls_have_a_timeout_attribute_only_if_it_is_set() -> None:
    usual = primitive.call_attributes("allreduce", primitive.DEFAULTS)
    limited = primitive.call_attributes(
        "allreduce", {**primitive.DEFAULTS, "timeout": 2.0}
    )
    # The core reads a timeout only if a call has more than 15 attributes.
    assert len(usual) == 15
    assert "timeout" not in usual
    assert limited == {**usual, "timeout": 2.0}
