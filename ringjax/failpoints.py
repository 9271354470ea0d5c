"""Failpoints: named points at which a test lets a process die, wait, fail or err.

    RINGJAX_FAILPOINTS="recovery.linked=kill@2;state.chunk=sleep(0.5)@any#3"
    RINGJAX_FAILPOINTS="exact.gradient=flip(17)@1#3"

An entry has a point and an action. "@2" limits it to the process with this target: the
worker number in an elastic job, otherwise the rank. "#3" limits it to the third time
that the process passes the point. By default, every process acts each time. "flip(17)"
flips bit 17 of the memory at the point, modulo its number of bits, as faulty hardware
may do; the points of `FLIPS` have this action and no other.
xla_ext/base/failpoint.h implements the points of the native core. Without the variable,
a point only tests an empty dict.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass

from ringjax.errors import RingjaxError

# name of a point -> state of the process when it passes the point
POINTS = {
    "recovery.halted": "all calls of an epoch were stopped; progress is not reported",
    "recovery.reported": "the progress of all calls was sent to the coordinator",
    "recovery.linked": "members of the next epoch are connected; it is not in force",
    "recovery.installed": "the next epoch is in force",
    "recovery.completed": "all communicators of the next epoch are connected",
    "join.ready": "a newcomer is about to ask for admission",
    "join.admitted": "the newcomer is a member and has no training state",
    "pause.asked": "all ranks have agreed to pause",
    "pause.said": "the coordinator was told that this rank pauses",
    "pause.over": "the ranks have changed; training has not started again",
    "agreement.halfway": "the ranks know the epoch, but not each other's state",
    "state.described": "rank 0 has sent a newcomer the description of the state",
    "state.chunk": "newcomers have received a part of the state",
    "restart.said": "the coordinator was asked for a restart of all ranks",
    "commit.saved": "this rank has saved a commit; other ranks may not have",
    "checkpoint.begun": "the folder of the checkpoint exists and is empty",
    "checkpoint.written": "the checkpoint is on the disk, under another name",
    "checkpoint.named": "the checkpoint is complete; older ones still exist",
    "coordinator.heard": "a message of a worker was received, but not handled",
    "coordinator.formed": "an epoch has begun; no worker was told",
    "coordinator.told": "the members of an epoch were told; ringrun was not",
    "memory.make": "shared memory is about to be created",
    "links.called": "connections to all lower ranks were requested",
    "links.shared": "shared memory exists; the communicator does not",
}
NATIVE = (
    *("call.agreed", "call.moving", "call.complete", "call.closed"),
    *("epoch.install", "memory.map", "cma.read", "device.aborted"),
    *("exact.gradient", "exact.send", "exact.sum", "exact.result"),
)
# points that flip a bit -> the memory in which they flip it
FLIPS = {
    "pieces.parameter": "a parameter of this rank, at the start of a step",
    "exact.gradient": "a gradient that is about to be added to an accumulator",
    "exact.send": "values that this rank is about to send in an exchange",
    "exact.sum": "a sum of several ranks' values",
    "exact.result": "the mean that an exchange returns on this rank",
}

# name of an action -> its argument if RINGJAX_FAILPOINTS states no argument
ACTIONS = {"kill": 0, "exit": 1, "sleep": 1, "error": 0, "eof": 0, "enospc": 0}
ACTIONS |= {"flip": 0}
_ENTRY = re.compile(
    r"(?P<point>[a-z.]+)=(?P<action>[a-z]+)(\((?P<number>[0-9.]{1,9})\))?"
    r"(@(any|(?P<target>\d{1,9})))?(#(?P<passage>\d{1,9}))?"
)


@dataclass(slots=True)
class Failpoint:
    """A parsed entry of RINGJAX_FAILPOINTS."""

    point: str
    action: str
    number: float  # the argument of the action, such as seconds of sleep
    target: int | None  # the worker or rank that acts; None for all
    passage: int  # the passage at which the process acts, from 1; 0 for all
    passed: int = 0  # how often this process has passed the point


def parse(text: str) -> list[Failpoint]:
    """Parses the text of RINGJAX_FAILPOINTS. A ValueError describes the expected text.

    Example:
        >>> [found] = parse("state.chunk=sleep(0.5)@2#3")
        >>> found.point, found.action, found.number, found.target, found.passage
        ('state.chunk', 'sleep', 0.5, 2, 3)
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise ValueError(f"POINT=ACTION[(NUMBER)][@WHO][#PASSAGE];…, not {part!r}")
        point, action = match["point"], match["action"]
        if point not in (known := dict.fromkeys((*POINTS, *NATIVE, *FLIPS))):
            raise ValueError(f"not {point!r}, but one of {', '.join(known)}")
        actions = [name for name in ACTIONS if (name == "flip") == (point in FLIPS)]
        if action not in actions:
            raise ValueError(f"{point}= one of {', '.join(actions)}, not {action!r}")
        try:
            number = float(match["number"] or ACTIONS[action])
        except ValueError:
            raise ValueError(f"a number in {part!r}") from None
        target = None if match["target"] is None else int(match["target"])
        passage = int(match["passage"] or 0)
        found.append(Failpoint(point, action, number, target, passage))
    return found


def checked(text: str) -> str:
    """Returns `text` unchanged if `parse` raises no ValueError."""
    parse(text)
    return text


_armed: dict[str, list[Failpoint]] = {}
_armed_text = ""
_lock = threading.Lock()


def arm(text: str, target: int | None) -> None:
    """Arms the failpoints of RINGJAX_FAILPOINTS in this process.

    Does nothing if this text is armed already. `target` is the worker number or rank of
    this process; None if it has neither.
    """
    global _armed_text
    if text == _armed_text:
        return
    _armed_text = text
    _armed.clear()
    for failpoint in parse(text):
        if failpoint.target not in (None, target):
            continue
        if failpoint.point in NATIVE:
            from ringjax import _native

            _native.arm_failpoint(
                failpoint.point, failpoint.action, failpoint.number, failpoint.passage
            )
        else:
            _armed.setdefault(failpoint.point, []).append(failpoint)


def passing(point: str) -> None:
    """Runs the armed failpoints of a point on this thread, which may raise an error."""
    if _armed:
        _run(point)


def flips(point: str) -> list[int]:
    """Returns the numbers of the bits to flip at this passage of a point of `FLIPS`.

    Example:
        >>> flips("pieces.parameter")
        []
    """
    return [int(each.number) for each in _due(point)] if _armed else []


def _run(point: str) -> None:
    for failpoint in _due(point):
        _act(failpoint.action, failpoint.number, f"failpoint {point}")


def _due(point: str) -> list[Failpoint]:
    """Counts a passage. Returns the failpoints that act at it, which it announces."""
    due = []
    with _lock:
        for failpoint in _armed.get(point, ()):
            failpoint.passed += 1
            if failpoint.passage in (0, failpoint.passed):
                due.append(failpoint)
    for failpoint in due:
        os.write(2, f"ringjax: failpoint {point}: {failpoint.action}\n".encode())
    return due


def _act(action: str, number: float, what: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(int(number))
        case "sleep":
            time.sleep(number)
        case "error":
            raise RingjaxError(what)
        case "eof":
            raise ConnectionResetError(errno.ECONNRESET, what)
        case "enospc":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({what})")
