"""Tests of the stack probe: the reported line of a late rank, one report per stall."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

import ringjax
from ringjax.world import stack_probe


def _frame_in(path: str) -> FrameType:
    """Returns the frame of a function in file `path` that this test has called."""
    found: list[FrameType] = []
    names = {"sys": sys, "found": found}
    code = "def installed():\n    found.append(sys._getframe())\ninstalled()"
    exec(compile(code, path, "exec"), names)
    return found[0]


def test_the_innermost_user_line_is_reported() -> None:
    for folder in (
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        os.path.dirname(ringjax.__file__),
    ):
        frame = _frame_in(os.path.join(folder, "somewhere", "deep.py"))
        place = stack_probe.describe_location(frame)
        assert place.startswith(f"it is at {os.path.basename(__file__)}:"), place
        assert place.endswith("in _frame_in")
    assert stack_probe.describe_location(_frame_in("/home/ada/train.py")) == (
        "it is at train.py:2 in installed"
    )
    assert stack_probe.describe_location(None) == "its main thread has ended"


def test_a_formatted_stack_is_bounded() -> None:
    def deeper(n: int) -> str:
        return deeper(n - 1) if n else stack_probe.format_stack(sys._getframe())

    text = deeper(300)
    assert len(text) <= (8 << 10) + 3
    # The innermost frames are kept.
    assert "stack_probe.format_stack(sys._getframe())" in text


class _Heartbeat:
    """A fake heartbeat with requests about calls of this rank."""

    def __init__(self) -> None:
        self.newest = 0
        self.stalls: list[str] = []
        self.answers: list[tuple[int, str]] = []
        self.answered = threading.Event()

    def asked(self) -> tuple[int, list[str]]:
        stalls, self.stalls = self.stalls, []
        return self.newest, stalls

    def answer(self, newest: int, place: str) -> None:
        self.answers.append((newest, place))
        self.newest = 0
        self.answered.set()


def test_a_request_gets_a_reply_and_a_stall_is_printed_once() -> None:
    lines: list[tuple[str, str]] = []
    printed = threading.Event()

    def log(level: str, text: str) -> None:
        lines.append((level, text))
        printed.set()

    one, gone = _Heartbeat(), _Heartbeat()
    probe = stack_probe.StackProbe(log)
    try:
        probe.register(one)
        probe.register(gone)
        probe.unregister(gone)
        one.newest, one.stalls = 3, ["rank 0 waits for this rank to call x"]
        os.eventfd_write(probe.wakeup_fd, 1)
        assert one.answered.wait(20)
        assert printed.wait(20)
        one.answered.clear()
        one.newest = 4
        os.eventfd_write(probe.wakeup_fd, 1)
        assert one.answered.wait(20)
    finally:
        probe.close()
    probe.close()
    assert probe.wakeup_fd == -1
    assert [newest for newest, _ in one.answers] == [3, 4]
    for _, place in one.answers:
        assert place.startswith(f"it is at {os.path.basename(__file__)}:")
        assert place.endswith(
            "in test_a_request_gets_a_reply_and_a_stall_is_printed_once"
        )
    assert gone.answers == []
    ((level, text),) = lines
    assert level == "warning"
    assert text.startswith(
        "rank 0 waits for this rank to call x; the main thread is at"
    )
    at = (
        "eventfd_write(probe.wakeup_fd, 1)",
        "one.answered.wait(20)",
        "printed.wait(20)",
    )
    assert any(line in text for line in at)
