"""Tests of the autotuner: its trials, their order, the winner, damaged memories."""

from __future__ import annotations

import random

import pytest

from ringjax.tuning import trials
from ringjax.tuning.trials import Setting, Trials

DEFAULT = Setting(25 << 20, 40 << 20)


def run(settings: list[Setting], seconds: list[float], rounds: int = 10) -> Trials:
    tried = Trials(settings, warmup=2, rounds=rounds)
    while not tried.finished:
        tried.record_step(seconds[settings.index(tried.setting)])
    return tried


@pytest.mark.parametrize("overlapped", [True, False, None])
def test_the_default_is_tried_first_and_nothing_twice(overlapped: bool | None) -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped)
    assert settings[0] == DEFAULT
    assert len(set(settings)) == len(settings) == (3 if overlapped is None else 5)
    if overlapped is False:  # the others would be the same program
        assert all(one.overlap for one in settings[1:])
    unfused = trials.candidate_settings(Setting(0, 0), overlapped)[1:]
    assert min(one.bucket_bytes for one in unfused) > 1 << 20


def test_all_take_turns_and_the_first_rounds_do_not_count() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=True)
    tried = Trials(settings, warmup=1, rounds=2)
    seen = []
    while not tried.finished:
        seen.append(tried.setting)
        tried.record_step(float(len(seen)))
    assert seen == 3 * settings
    assert tried.times == [[6.0, 7.0, 8.0, 9.0, 10.0], [11.0, 12.0, 13.0, 14.0, 15.0]]
    assert trials.medians(tried.times)[0] == 8.5


def test_the_fastest_wins() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=True)
    tried = run(settings, [1.0, 0.9, 1.2, 0.7, 0.8])
    assert tried.winner(tried.times) == settings[3]


def test_what_is_hardly_faster_does_not_win() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=None)
    tried = run(settings, [1.0, 0.99, 0.985])
    assert tried.winner(tried.times) == DEFAULT


def test_a_setting_that_was_lucky_in_some_rounds_does_not_win() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=None)
    times = [[1.0, 0.5, 1.0] if r % 2 else [1.0, 1.1, 1.0] for r in range(11)]
    times += [[1.0, 0.5, 1.0]]  # the median is good, and half of the rounds are not
    tried = Trials(settings, 0, len(times))
    assert tried.winner(times) == DEFAULT


def test_noise_alone_hardly_ever_leaves_the_default() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=True)
    rng = random.Random(7)
    left = 0
    for _ in range(300):
        times = [[rng.lognormvariate(0, 0.1) for _ in settings] for _ in range(10)]
        left += Trials(settings, 0, 10).winner(times) != DEFAULT
    assert left < 60  # each of four rivals wins by chance with about 5 %


@pytest.mark.parametrize(
    "setting", trials.candidate_settings(DEFAULT, overlapped=False)
)
def test_a_setting_can_be_written_down(setting: Setting) -> None:
    assert trials.from_json(trials.to_json(setting)) == setting
    assert str(setting)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 7, "x", {"a": 1}, [], [1, 2], [1, 2, 3], [1, 2, None, 4]),
        *([1, -2, None], [-1, 2, None], [True, 2, None], [1.5, 2, True]),
        *([1, "2", None], [1, 2, "True"]),
    ],
)
def test_what_is_no_setting_is_not_believed(value: object) -> None:
    assert trials.from_json(value) is None


def test_a_setting_holds_only_where_it_is_tried() -> None:
    assert trials.active_setting() is None
    with trials.use_setting(DEFAULT):
        assert trials.active_setting() == DEFAULT
        with trials.use_setting(None):
            assert trials.active_setting() is None
        assert trials.active_setting() == DEFAULT
    assert trials.active_setting() is None
