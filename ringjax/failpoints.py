"""Failpoints: named places at which a test has a process die, wait or fail.

    RINGJAX_FAILPOINTS="recovery.linked=kill@2;state.chunk=sleep(0.5)@any#3"

A point, an action, whom it concerns (a worker of an elastic job, a rank of another one;
anybody if it is not said) and at which passage (else at all of them). Points of the
native core are the same in xla_ext/base/failpoint.h. Without the variable a point is
one look at an empty dict.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ringjax.errors import RingjaxError

POINTS = {
    "recovery.halted": "all calls of an epoch were stopped, and nobody knows how far",
    "recovery.reported": "the coordinator was told how far they came",
    "recovery.linked": "the next epoch's members are connected; it is not in force",
    "recovery.installed": "it is in force",
    "recovery.completed": "what does not have to be there at once is there, too",
    "join.ready": "a newcomer is about to ask in",
    "join.admitted": "it is a member, and has no state",
    "pause.asked": "all ranks have agreed to pause",
    "pause.said": "the coordinator was told that this rank stands still",
    "pause.over": "the ranks have changed, and training has not begun again",
    "agreement.halfway": "the ranks know the epoch, and not yet each other's state",
    "state.described": "a newcomer knows what it will get, or rank 0 has said so",
    "state.chunk": "some bytes of the state are at the newcomers",
    "restart.said": "all ranks shall go back to their last commit",
    "commit.saved": "a commit is kept here, and maybe nowhere else",
    "checkpoint.begun": "its folder is there, and empty",
    "checkpoint.written": "all of it is on the disk, under another name",
    "checkpoint.named": "it is complete, and older ones are still there",
    "coordinator.heard": "a message of a worker has come, and nothing was done",
    "coordinator.formed": "an epoch has begun, and nobody was told",
    "coordinator.told": "its members were told, and ringrun was not",
    "memory.make": "shared memory is about to be made",
    "mesh.called": "the lower ranks were called",
    "mesh.shared": "shared memory is there, and no communicator",
}
NATIVE = (
    *("call.agreed", "call.moving", "call.complete", "call.closed"),
    *("epoch.install", "memory.map", "cma.read", "device.aborted"),
)


def _sleep(seconds: float, _: str) -> None:
    time.sleep(seconds)


def _exit(code: float, _: str) -> None:
    os._exit(int(code))


def _kill(_: float, __: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _error(_: float, point: str) -> None:
    raise RingjaxError(f"failpoint {point}")


def _eof(_: float, point: str) -> None:
    raise ConnectionResetError(errno.ECONNRESET, f"failpoint {point}")


def _enospc(_: float, point: str) -> None:
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (failpoint {point})")


# With the number that is meant where none is given.
ACTIONS: dict[str, tuple[float, Callable[[float, str], None]]] = {
    "kill": (0.0, _kill),
    "exit": (1.0, _exit),
    "sleep": (1.0, _sleep),
    "error": (0.0, _error),
    "eof": (0.0, _eof),
    "enospc": (0.0, _enospc),
}
_ENTRY = re.compile(
    r"(?P<point>[a-z.]+)=(?P<action>[a-z]+)(\((?P<number>[0-9.]{1,9})\))?"
    r"(@(any|(?P<who>\d{1,9})))?(#(?P<passage>\d{1,9}))?"
)


@dataclass(slots=True)
class Failpoint:
    """One of the failpoints that were asked for.

    Attributes:
        who: the worker or rank, None: anybody.
        passage: from 1, 0: all of them.
    """

    point: str
    action: str
    number: float
    who: int | None
    passage: int
    passed: int = 0


def entries(text: str) -> list[Failpoint]:
    """What a text asks for.

    Raises:
        ValueError: saying what is expected.

    Example:
        >>> [each] = entries("state.chunk=sleep(0.5)@2#3")
        >>> each.point, each.action, each.number, each.who, each.passage
        ('state.chunk', 'sleep', 0.5, 2, 3)
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise ValueError(f"POINT=ACTION[(NUMBER)][@WHO][#PASSAGE];…, not {part!r}")
        point, action = match["point"], match["action"]
        if point not in POINTS and point not in NATIVE:
            raise ValueError(
                f"not {point!r}, but one of {', '.join([*POINTS, *NATIVE])}"
            )
        if action not in ACTIONS:
            raise ValueError(f"{point}= one of {', '.join(ACTIONS)}, not {action!r}")
        try:
            number = float(match["number"] or ACTIONS[action][0])
        except ValueError:
            raise ValueError(f"a number in {part!r}") from None
        who = None if match["who"] is None else int(match["who"])
        found.append(Failpoint(point, action, number, who, int(match["passage"] or 0)))
    return found


def checked(text: str) -> str:
    """The same text, if `entries` understands it; raises as it does."""
    entries(text)
    return text


_armed: dict[str, list[Failpoint]] = {}
_text = ""
_lock = threading.Lock()


def arm(text: str, who: int | None) -> None:
    """Puts failpoints in force in this process; a second time only others than before.

    Args:
        text: as `entries` understands it.
        who: the worker or rank that this process is, None: neither.
    """
    global _text
    if text == _text:
        return
    _text = text
    _armed.clear()
    for entry in entries(text):
        if entry.who not in (None, who):
            continue
        if entry.point in NATIVE:
            from ringjax import _native

            _native.arm_failpoint(
                entry.point, entry.action, entry.number, entry.passage
            )
        else:
            _armed.setdefault(entry.point, []).append(entry)


def passing(point: str) -> None:
    """This thread is at a point.

    Raises:
        RingjaxError, OSError: a test wants it.
    """
    if _armed:
        _hit(point)


def _hit(point: str) -> None:
    due = []
    with _lock:
        for entry in _armed.get(point, ()):
            entry.passed += 1
            if entry.passage in (0, entry.passed):
                due.append(entry)
    for entry in due:
        os.write(2, f"ringjax: failpoint {point}: {entry.action}\n".encode())
        ACTIONS[entry.action][1](entry.number, point)
