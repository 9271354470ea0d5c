"""Tests that a process counts as hung only after silence while this process ran."""

from __future__ import annotations

from ringjax.run.elastic.coordinator_process import LivenessProbe


def poll_probe(
    probe: LivenessProbe, start: float, seconds: float, pause: float = 0.1
) -> float:
    """Calls the probe repeatedly for `seconds`. Returns the time at the end."""
    count = round(seconds / pause)
    for number in range(count):
        assert not probe.should_ask(start + (number + 1) * pause)
    return start + count * pause


def answered_probe() -> LivenessProbe:
    """Returns a probe that received one answer and sent its next question at 10.0."""
    probe = LivenessProbe(5.0)
    assert probe.should_ask(0.0)
    probe.record_answer(9.0)
    assert not probe.should_ask(9.5)
    assert probe.should_ask(10.0)
    return probe


def test_silence_is_detected() -> None:
    probe = answered_probe()
    now = poll_probe(probe, 10.0, 4.9)
    assert not probe.hung
    poll_probe(probe, now, 0.3)
    assert probe.hung


def test_an_answer_ends_the_silence() -> None:
    probe = answered_probe()
    now = poll_probe(probe, 10.0, 4.9)
    probe.record_answer(now)
    assert not probe.hung
    assert not probe.should_ask(now + 0.9)
    assert probe.should_ask(now + 1.1)
    poll_probe(probe, now + 1.1, 4.8)
    assert not probe.hung


def test_time_while_this_process_was_suspended_does_not_count() -> None:
    probe = answered_probe()
    assert not probe.should_ask(1000.0)
    now = poll_probe(probe, 1000.0, 4.3)
    assert not probe.hung
    poll_probe(probe, now, 0.5)
    assert probe.hung


def test_a_slow_start_is_no_silence() -> None:
    probe = LivenessProbe(5.0)
    assert probe.should_ask(0.0)
    now = poll_probe(probe, 0.0, 59.0)
    assert not probe.hung
    poll_probe(probe, now, 1.2)
    assert probe.hung
