"""A process counts as hung only after silence while this process was running."""

from __future__ import annotations

from ringjax.run.elastic.coordinator_process import LivenessProbe


def looks(
    probe: LivenessProbe, start: float, seconds: float, pause: float = 0.1
) -> float:
    """Calls the probe again and again; returns the time at the end."""
    count = round(seconds / pause)
    for number in range(count):
        assert not probe.should_ask(start + (number + 1) * pause)
    return start + count * pause


def known() -> LivenessProbe:
    """Returns a probe that was answered once, and has asked again at 10.0."""
    probe = LivenessProbe(5.0)
    assert probe.should_ask(0.0)
    probe.record_answer(9.0)
    assert not probe.should_ask(9.5)
    assert probe.should_ask(10.0)
    return probe


def test_silence_is_noticed() -> None:
    probe = known()
    now = looks(probe, 10.0, 4.9)
    assert not probe.hung
    looks(probe, now, 0.3)
    assert probe.hung


def test_an_answer_ends_it() -> None:
    probe = known()
    now = looks(probe, 10.0, 4.9)
    probe.record_answer(now)
    assert not probe.hung
    assert not probe.should_ask(now + 0.9)
    assert probe.should_ask(now + 1.1)
    looks(probe, now + 1.1, 4.8)
    assert not probe.hung


def test_time_in_which_we_stood_still_does_not_count() -> None:
    probe = known()
    assert not probe.should_ask(1000.0)
    now = looks(probe, 1000.0, 4.3)
    assert not probe.hung
    looks(probe, now, 0.5)
    assert probe.hung


def test_a_start_takes_its_time() -> None:
    probe = LivenessProbe(5.0)
    assert probe.should_ask(0.0)
    now = looks(probe, 0.0, 59.0)
    assert not probe.hung
    looks(probe, now, 1.2)
    assert probe.hung
