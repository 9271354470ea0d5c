"""Finds ranks that would compute other bits than the rest, before a step does so.

`facts` are all that the bits of a piece depend on, besides the arguments of the step.
All ranks exchange them in the first step, and again when ranks have joined.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ringjax import eager, runtime, stderr
from ringjax.elastic.place import Place
from ringjax.errors import InvalidArgument
from ringjax.pieces import machine
from ringjax.pieces.bits import hash_words
from ringjax.pieces.training import NAME

# Bytes of the message of a rank. All messages have one length, so that a loss during
# the exchange only removes a row.
_ROW = 8192
_LONGEST = 500  # characters of a fact
_REMEDIES = {
    "jaxlib": "install one version of jax and jaxlib on all hosts",
    "device": "use one kind of device on all hosts",
    "CPU": "use hosts with one kind of CPU",
    "CPU features": "use hosts with one kind of CPU",
    "XLA threads": "start the job by ringrun --same-bits, or set RINGJAX_SAME_BITS=1",
    "XLA_FLAGS": "set XLA_FLAGS alike for all ranks",
    "pieces": "pass the same number of pieces on all ranks",
    "program": "the loss must not use rank(), size() or other values of one rank",
    "training state": "begin with equal parameters (the same seed, file or broadcast), "
    "and let `load` depend on step and piece, never on the rank",
}
_warned = False


class StartCheck:
    """Compares the facts of all ranks whenever the places of the ranks have changed."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self._program = ""
        self._agreed = False

    def __call__(
        self, place: Place, program: Callable[[], str], training: object
    ) -> None:
        """Compares this rank with all others. All ranks call it before the same step.

        Args:
            place: the place of this rank.
            program: returns the text of the compiled programs.
            training: the tree of arrays from which the step begins.

        Raises:
            InvalidArgument: ranks differ. If these ranks have joined a job that runs,
                only they raise the error.
        """
        self._program = self._program or program()
        own = machine.facts()
        if runtime.is_newcomer():  # warm_up; the rank is compared when it has joined
            return
        _check_threads(own)
        own = {name: _short(value) for name, value in own.items()} | {
            "pieces": str(self._pieces),
            "program": hashlib.sha256(self._program.encode()).hexdigest()[:16],
            "training state": hash_words(training).tobytes().hex(),
        }
        if place.count > 1:
            self._compare(own)
        self._agreed = True

    def _compare(self, own: dict[str, str]) -> None:
        rank = runtime.rank()
        rows = _exchange([rank, self._agreed, own])
        if any(agreed for _, agreed, _ in rows):
            # A newcomer that differs must not end the job, so only it sees itself.
            rows = [row for row in rows if row[1] or row[0] == rank]
        facts = {row[0]: row[2] for row in rows}
        if problem := difference(facts):
            is_first = not any(agreed for _, agreed, _ in rows)
            if is_first and problem.partition(": ")[2].startswith("program"):
                problem += self._different_line(min(facts))
            raise InvalidArgument(f"{NAME}: {problem}")

    def _different_line(self, root: int) -> str:
        """Compares the programs with that of rank `root`. All ranks call it."""
        name = f"{NAME}.program"
        first = eager.broadcast_object(self._program, root, name).splitlines()
        own = self._program.splitlines()
        for there, here in itertools.zip_longest(first, own, fillvalue="(no line)"):
            if there != here:
                return (
                    f"; the programs of rank {root} and of this rank have\n"
                    f"{_short(there.strip())}\n{_short(here.strip())}"
                )
        return ""


def difference(facts: dict[int, dict[str, str]]) -> str:
    """Returns a text about the first fact in which ranks differ; "" if they are equal.

    Example:
        >>> found = difference({0: {"pieces": "12"}, 1: {"pieces": "24"}})
        >>> found.split(";")[0]
        'ranks would compute different bits: pieces is 12 on rank 0 and 24 on rank 1'
    """
    for name, remedy in _REMEDIES.items():
        ranks: dict[str, list[int]] = {}
        for rank, found in facts.items():
            ranks.setdefault(found.get(name, ""), []).append(rank)
        if len(ranks) > 1:
            values = " and ".join(
                f"{_shown(name, value, ranks)} on {_named(who)}"
                for value, who in ranks.items()
            )
            return f"ranks would compute different bits: {name} is {values}; {remedy}"
    return ""


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _shown(name: str, value: str, others: Iterable[str]) -> str:
    """Returns a value for the text. Of CPU features only what not all ranks have."""
    if name != "CPU features":
        return value or "not set"
    common = set.intersection(*(set(each.split()) for each in others))
    return " ".join(word for word in value.split() if word not in common) or "less"


def _short(text: str) -> str:
    """Returns the text, or its beginning and a hash if it is long."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _exchange(row: list[Any]) -> list[list[Any]]:
    """Returns the rows of all ranks.

    This is one call, which an elastic job repeats as a whole if a rank is lost.
    `eager.allgather_object` is two: a loss between them would mix up the rows.
    """
    text = json.dumps(row, ensure_ascii=False).encode()
    padded = np.frombuffer(text.ljust(_ROW), np.uint8)[None]
    rows = np.asarray(eager.allgather(padded, name=f"{NAME}.check"))
    return [json.loads(bytes(each)) for each in rows]


def _check_threads(facts: dict[str, str]) -> None:
    """Warns once, on rank 0, if the bits depend on the number of cores of the host."""
    global _warned
    threads = facts.get("XLA threads", "1")
    if threads == "1":
        return
    if runtime.config().same_bits:
        # XLA has at least one thread for each device.
        if threads.startswith(f"{jax.local_device_count()} "):
            return
        raise InvalidArgument(
            f"{NAME}: XLA has {threads} threads in spite of RINGJAX_SAME_BITS, because "
            "JAX was used before ringjax.init(): call ringjax.init() first, or use "
            "ringrun"
        )
    if runtime.rank() == 0 and not _warned:
        _warned = True
        stderr.line(
            f"[ringjax 0/{runtime.size()}] warning: {NAME}: XLA has more than one "
            f"thread ({threads}), and its results depend on these numbers; for the "
            "same bits on all hosts, start the job by ringrun --same-bits, or set "
            "RINGJAX_SAME_BITS=1"
        )
