"""Tests of the autotuner: candidates, order of trials, the winner, stored settings."""

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
def test_candidates_begin_with_the_default_and_are_unique(
    overlapped: bool | None,
) -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped)
    assert settings[0] == DEFAULT
    assert len(set(settings)) == len(settings) == (3 if overlapped is None else 5)
    if overlapped is False:  # without overlap, the other settings make equal programs
        assert all(one.overlap for one in settings[1:])
    unfused = trials.candidate_settings(Setting(0, 0), overlapped)[1:]
    assert min(one.bucket_bytes for one in unfused) > 1 << 20


def test_settings_take_turns_and_warmup_rounds_do_not_count() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=True)
    tried = Trials(settings, warmup=1, rounds=2)
    seen = []
    while not tried.finished:
        seen.append(tried.setting)
        tried.record_step(float(len(seen)))
    assert seen == 3 * settings
    assert tried.times == [[6.0, 7.0, 8.0, 9.0, 10.0], [11.0, 12.0, 13.0, 14.0, 15.0]]
    assert trials.medians(tried.times)[0] == 8.5


def test_the_fastest_setting_wins() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=True)
    tried = run(settings, [1.0, 0.9, 1.2, 0.7, 0.8])
    assert tried.winner(tried.times) == settings[3]


def test_a_slightly_faster_setting_does_not_win() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=None)
    tried = run(settings, [1.0, 0.99, 0.985])
    assert tried.winner(tried.times) == DEFAULT


def test_a_setting_that_is_fast_in_half_of_the_rounds_does_not_win() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=None)
    times = [[1.0, 0.5, 1.0] if r % 2 else [1.0, 1.1, 1.0] for r in range(11)]
    times += [
        [1.0, 0.5, 1.0]
    ]  # the median is good, but about half of the rounds are bad
    tried = Trials(settings, 0, len(times))
    assert tried.winner(times) == DEFAULT


def test_noise_rarely_changes_the_default() -> None:
    settings = trials.candidate_settings(DEFAULT, overlapped=True)
    rng = random.Random(7)
    left = 0
    for _ in range(300):
        times = [[rng.lognormvariate(0, 0.1) for _ in settings] for _ in range(10)]
        left += Trials(settings, 0, 10).winner(times) != DEFAULT
    assert left < 60  # each of four other settings wins by chance in about 5 %


@pytest.mark.parametrize(
    "setting", trials.candidate_settings(DEFAULT, overlapped=False)
)
def test_a_setting_survives_a_round_trip_to_json(setting: Setting) -> None:
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
def test_malformed_settings_are_ignored(value: object) -> None:
    assert trials.from_json(value) is None


def test_use_setting_is_nested_and_restores() -> None:
    assert trials.active_setting() is None
    with trials.use_setting(DEFAULT):
        assert trials.active_setting() == DEFAULT
        with trials.use_setting(None):
            assert trials.active_setting() is None
        assert trials.active_setting() == DEFAULT
    assert trials.active_setting() is None
