"""Tells ringrun how this rank is, while somebody there wants to know.

A thread waits for ringrun's agent on this host to ask; until then it costs nothing.
Then it sends a sample now and then, at the same moments as all other ranks, so that
they tell of the same calls. Whatever happens to the socket, the rank goes on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any, Protocol

from ringjax import _native
from ringjax.control.polling import wait_readable
from ringjax.control.unix_peer import peer_uid
from ringjax.monitor import sample, sockets
from ringjax.monitor.sample import Sample
from ringjax.monitor.stragglers import WaitRecord
from ringjax.world.epoch import Epoch
from ringjax.world.lanes import LANE
from ringjax.world.places import LOOK, Places
from ringjax.world.record import KEPT
from ringjax.world.report import host

_MOST_WAITS = 256  # in a sample
_STEPS = 5.0  # seconds between two looks for the length of a step, which cost more
_GIVE_UP = 5.0  # seconds for the agent to take what is sent
_LEAST, _LONGEST = 0.05, 3600.0  # seconds between two samples


class Home(Protocol):
    """What is needed of the world."""

    recorder: _native.Recorder
    tuned: str

    @property
    def present(self) -> Epoch | None:
        """The one in force; None: there is none, or none yet."""


class Teller:
    """Answers ringrun's questions in a thread of its own.

    Args:
        where: name of the agent's abstract unix socket.
        own: this process's number for ringrun.
    """

    def __init__(self, home: Home, where: str, own: int) -> None:
        self._home, self._where, self._own = home, where, own
        self._places = Places()
        self._seen = 0
        self._every = 0.0  # seconds between two samples; 0: nobody wants to know
        self._step = self._stepped = 0.0
        self._input = b""
        self._epoch: Epoch | None = None
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(
            target=self._run, name="ringjax-telling", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Tells how it was at the end, if somebody wants to know. May be repeated."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(1.0)

    def release(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._socket.close()

    def _run(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            sockets.connect_within(self._socket, f"\0{self._where}", _GIVE_UP)
            if peer_uid(self._socket) != os.geteuid():
                return
            self._socket.sendall(f'{{"id":{self._own}}}\n'.encode())
            if self._closing:  # before there was a connection to shut down
                self._socket.shutdown(socket.SHUT_RD)
            self._serve()

    def _serve(self) -> None:
        due = 0.0
        while self._asked(due):
            self._places.look()
            now = time.time()
            if now >= due:
                if due:
                    self._tell()
                # Whole multiples: all ranks tell of the same calls.
                due = (now // self._every + 1) * self._every
        if self._every:
            self._tell()

    def _asked(self, due: float) -> bool:
        """Waits for the next look, or for a question; False: it is over."""
        while True:
            pause = min(LOOK, max(0.0, due - time.time())) if self._every else None
            if not wait_readable(self._socket.fileno(), pause):
                return True
            data = self._socket.recv(4096)
            if not data:
                return False
            *lines, self._input = (self._input + data)[-4096:].split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    every = float(line)
                    self._every = min(max(every, _LEAST), _LONGEST) if every > 0 else 0

    def _tell(self) -> None:
        try:
            told = self._sample()
        except RuntimeError:  # of an epoch that has just ended
            return
        if told is not None:
            self._socket.sendall(told.text().encode() + b"\n")

    def _sample(self) -> Sample | None:
        epoch, recorder = self._home.present, self._home.recorder
        if epoch is None:
            return None
        if epoch is not self._epoch:  # numbers of calls begin anew
            self._epoch, self._seen = epoch, recorder.count
        before = self._seen
        self._seen, waits = _native.waits_since(recorder, before)
        told = thinned(waits)
        kept = min(1.0, KEPT / max(1, self._seen - before))
        standing = epoch.standing
        late = not self._step or time.monotonic() - self._stepped > _STEPS
        if standing.rank == 0 and late:
            self._step, self._stepped = step(recorder.events()), time.monotonic()
        waiting, moving = recorder.busy()
        return Sample(
            standing.rank,
            standing.size,
            epoch.number,
            host(epoch, standing.rank) or socket.gethostname(),
            recorder.count,
            waiting,
            moving,
            _exposed(epoch),
            told,
            kept * len(told) / max(1, len(waits)),
            self._places.shares,
            self._home.tuned,
            _memory(),
            self._step if standing.rank == 0 else 0.0,
            sample.sums(recorder.totals()),
        )


def thinned(waits: list[WaitRecord], most: int = _MOST_WAITS) -> list[WaitRecord]:
    """The same calls on all ranks, however many each has: those of round numbers.

    Example:
        >>> thinned([(False, number, 0) for number in range(10)], 3)
        [(False, 0, 0), (False, 4, 0), (False, 8, 0)]
    """
    divisor = 1
    while len(waits) > most:
        divisor *= 2
        waits = [each for each in waits if each[1] % divisor == 0]
        if divisor > 1 << 20:  # all have one number
            return waits[:most]
    return waits


def step(events: list[dict[str, Any]]) -> float:
    """Seconds from step to step: how often a call of one name comes, usually.

    Returns:
        0 if no call has come again.

    Example:
        >>> call = {"named": True, "set": 0, "op": "allreduce", "bytes": 4}
        >>> step([call | {"name": "x", "entered": t} for t in (1.0, 3.0, 5.0)])
        2.0
    """
    times: dict[tuple[Any, ...], list[float]] = {}
    for each in events:
        key = tuple(each[name] for name in ("named", "set", "op", "name", "bytes"))
        times.setdefault(key, []).append(each["entered"])
    # Each call has one vote, as some names come once in a hundred steps.
    found = sorted(
        ((max(entered) - min(entered)) / (len(entered) - 1), len(entered))
        for entered in times.values()
        if len(entered) > 1
    )
    votes = [seconds for seconds, count in found for _ in range(count)]
    return votes[len(votes) // 2] if votes else 0.0


def _exposed(epoch: Epoch) -> float:
    """Seconds that programs have waited for what overlaps, in this epoch."""
    found = 0.0
    for number, communicator in list(epoch.communicators.items()):
        if number < LANE:
            overlap = communicator.stats().get("overlap", {})
            found += overlap.get("exposed_seconds", 0.0)
    return found


def _memory() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
