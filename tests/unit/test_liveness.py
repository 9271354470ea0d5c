"""When a process counts as hung: only after silence in which we looked."""

from __future__ import annotations

from ringjax.run.elastic.liveness import LivenessProbe


def looks(
    pulse: LivenessProbe, start: float, seconds: float, pause: float = 0.1
) -> float:
    """Looks at the clock again and again; returns the time at the end."""
    count = round(seconds / pause)
    for number in range(count):
        assert not pulse.asks(start + (number + 1) * pause)
    return start + count * pause


def known() -> LivenessProbe:
    """One that has answered before and was asked again, at 10.0."""
    pulse = LivenessProbe(5.0)
    assert pulse.asks(0.0)
    pulse.answered(9.0)
    assert not pulse.asks(9.5)
    assert pulse.asks(10.0)
    return pulse


def test_silence_is_noticed() -> None:
    pulse = known()
    now = looks(pulse, 10.0, 4.9)
    assert not pulse.hung
    looks(pulse, now, 0.3)
    assert pulse.hung


def test_an_answer_ends_it() -> None:
    pulse = known()
    now = looks(pulse, 10.0, 4.9)
    pulse.answered(now)
    assert not pulse.hung
    assert not pulse.asks(now + 0.9)
    assert pulse.asks(now + 1.1)
    looks(pulse, now + 1.1, 4.8)
    assert not pulse.hung


def test_time_in_which_we_stood_still_does_not_count() -> None:
    pulse = known()
    assert not pulse.asks(1000.0)
    now = looks(pulse, 1000.0, 4.3)
    assert not pulse.hung
    looks(pulse, now, 0.5)
    assert pulse.hung


def test_a_start_takes_its_time() -> None:
    pulse = LivenessProbe(5.0)
    assert pulse.asks(0.0)
    now = looks(pulse, 0.0, 59.0)
    assert not pulse.hung
    looks(pulse, now, 1.2)
    assert pulse.hung
