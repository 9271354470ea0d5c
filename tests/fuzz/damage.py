"""Damages bytes and JSON at random, and feeds them to one parser after another.

python_targets.py defines the parsers, their valid inputs and their allowed exceptions.
Coverage is not measured: these parsers are small, so the number of inputs matters more.
"""

from __future__ import annotations

import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

LONGEST = 5.0  # seconds of CPU time for one input
MOST_INPUT = 4096  # bytes
MOST_MEMORY = 32 << 20  # bytes that a parser may allocate for one input
_LOOK_AT_MEMORY = 64  # inputs between two measurements, which are slow
_NUMBERS = (0, 1, -1, 2, 63, 127, 255, 256, 65535, 1 << 31, (1 << 63) - 1, 1 << 64)


@dataclass(frozen=True)
class Target:
    """A function under test that reads foreign bytes.

    Attributes:
        run: reads an input. Its assertions must hold for all inputs.
        seeds: valid inputs.
        raises: the only exceptions that it may raise.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    raises: tuple[type[BaseException], ...] = ()


class Broken(AssertionError):
    """An input had an effect that no input may have."""


def damaged(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Copies a random seed and damages the copy at one to six places."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(data))
        length = chance.randint(1, 16)
        match chance.randrange(9):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 2 if at < len(data):
                data[at] = chance.randrange(256)
            case 3:
                size = chance.choice((1, 2, 4, 8))
                number = chance.choice(_NUMBERS) % (1 << 8 * size)
                data[at : at + size] = number.to_bytes(size, chance.choice(_ORDERS))
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length] * chance.choice((1, 2, 40))
            case 6:
                data[at:at] = bytes([chance.choice(b'09aAzZ -[](){}",:.=\0\xff\xc3#')])
            case 7:
                data[at:at] = str(chance.choice(_NUMBERS)).encode()
            case _:
                other = chance.choice(seeds)
                start = chance.randint(0, len(other))
                data[at : at + chance.choice((0, length))] = other[start:][:length]
    return bytes(data[:MOST_INPUT])


_ORDERS: tuple[Any, ...] = ("little", "big")
_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3.5, 10**400, -(10**19), 1e308, "", "0", "1"),
    *(float("nan"), float("inf"), "\ud800", "x" * 300, [], {}, [0], [[]], {"0": 1}),
    *(["1", 2, None], {"": {}}, [1, 2, True], {"0": [1, 1, True]}, {"-1": [0]}),
)


def strange(value: Any, chance: random.Random) -> Any:
    """Copies a JSON value, and replaces, removes or adds about one part of it."""
    if chance.random() < 0.15:
        return chance.choice(_STRANGE)
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        changed = dict(value)
        match chance.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[str(chance.choice(_STRANGE))] = chance.choice(_STRANGE)
            case _:
                changed[key] = strange(value[key], chance)
        return changed
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        return [*value[:at], strange(value[at], chance), *value[at + 1 :]]
    return chance.choice(_STRANGE) if chance.random() < 0.5 else value


def search(target: Target, runs: int, seed: int = 1, seconds: float = 1e9) -> int:
    """Feeds damaged inputs to a target; returns their number.

    Raises:
        Broken: if an input raised an exception that is not allowed, took too long, or
            made the parser allocate too much memory. The text contains the input.
    """
    chance = random.Random(f"{seed} {target.name}")
    end = time.monotonic() + seconds
    for data in target.seeds:
        _run(target, data, measured=True)
    for number in range(runs):
        if number % 64 == 0 and time.monotonic() > end:
            return number
        data = damaged(target.seeds, chance)
        _run(target, data, measured=number % _LOOK_AT_MEMORY == 0)
    return runs


def _run(target: Target, data: bytes, *, measured: bool) -> None:
    before = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    if measured:
        tracemalloc.start()
    try:
        try:
            target.run(data)
        finally:  # the alarm may also arrive here
            signal.setitimer(signal.ITIMER_PROF, 0)
    except target.raises:
        pass
    except BaseException as error:
        text = f"{target.name}: {type(error).__name__}: {error}; the input: {data!r}"
        raise Broken(text) from error
    finally:
        signal.signal(signal.SIGPROF, before)
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
        if measured:
            tracemalloc.stop()
    if peak > MOST_MEMORY:
        raise Broken(f"{target.name}: took {peak} bytes for the input {data!r}")


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {LONGEST:g} s")
