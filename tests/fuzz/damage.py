"""Damages bytes and JSON at random, and passes them to parsers.

python_targets.py defines the parsers, their valid inputs and their allowed exceptions.
Coverage does not steer the damage, because it would reduce the number of inputs, which
matters more for small parsers.
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

MAX_SECONDS = 5.0  # of CPU time for one input
MAX_INPUT = 4096  # bytes
MAX_MEMORY = 32 << 20  # bytes that a parser may allocate for one input
_MEMORY_INTERVAL = 64  # inputs between two measurements of memory, which are slow
_NUMBERS = (0, 1, -1, 2, 63, 127, 255, 256, 65535, 1 << 31, (1 << 63) - 1, 1 << 64)


@dataclass(frozen=True)
class Target:
    """A function under test that reads untrusted bytes.

    Attributes:
        run: reads an input. Its assertions must hold for all inputs.
        seeds: valid inputs.
        raises: the exceptions that `run` may raise.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    raises: tuple[type[BaseException], ...] = ()


class BadInputError(AssertionError):
    """An input caused a wrong exception, or took too much time or memory."""


def damage_bytes(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Copies a random seed and damages the copy at one to six places."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(data))
        length = rng.randint(1, 16)
        match rng.randrange(9):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(data):
                data[at] = rng.randrange(256)
            case 3:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(_NUMBERS) % (1 << 8 * size)
                data[at : at + size] = number.to_bytes(size, rng.choice(_ORDERS))
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length] * rng.choice((1, 2, 40))
            case 6:
                data[at:at] = bytes([rng.choice(b'09aAzZ -[](){}",:.=\0\xff\xc3#')])
            case 7:
                data[at:at] = str(rng.choice(_NUMBERS)).encode()
            case _:
                other = rng.choice(seeds)
                start = rng.randint(0, len(other))
                data[at : at + rng.choice((0, length))] = other[start:][:length]
    return bytes(data[:MAX_INPUT])


_ORDERS: tuple[Any, ...] = ("little", "big")
_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3.5, 10**400, -(10**19), 1e308, "", "0", "1"),
    *(float("nan"), float("inf"), "\ud800", "x" * 300, [], {}, [0], [[]], {"0": 1}),
    *(["1", 2, None], {"": {}}, [1, 2, True], {"0": [1, 1, True]}, {"-1": [0]}),
)


def damage_json(value: Any, rng: random.Random) -> Any:
    """Copies a JSON value, and replaces, removes or adds about one part of it."""
    if rng.random() < 0.15:
        return rng.choice(_STRANGE)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[str(rng.choice(_STRANGE))] = rng.choice(_STRANGE)
            case _:
                changed[key] = damage_json(value[key], rng)
        return changed
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], damage_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(_STRANGE) if rng.random() < 0.5 else value


def fuzz(target: Target, runs: int, seed: int = 1, seconds: float = 1e9) -> int:
    """Passes up to `runs` damaged inputs to a target; returns their number.

    Raises:
        BadInputError: if an input raised an exception that is not allowed, took too
            long, or made the parser allocate too much memory. The text has the input.
    """
    rng = random.Random(f"{seed} {target.name}")
    end = time.monotonic() + seconds
    for data in target.seeds:
        _run(target, data, measured=True)
    for number in range(runs):
        if number % 64 == 0 and time.monotonic() > end:
            return number
        data = damage_bytes(target.seeds, rng)
        _run(target, data, measured=number % _MEMORY_INTERVAL == 0)
    return runs


def _run(target: Target, data: bytes, *, measured: bool) -> None:
    before = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    if measured:
        tracemalloc.start()
    try:
        try:
            target.run(data)
        finally:  # the signal may also arrive in these lines
            signal.setitimer(signal.ITIMER_PROF, 0)
    except target.raises:
        pass
    except BaseException as error:
        text = f"{target.name}: {type(error).__name__}: {error}; the input: {data!r}"
        raise BadInputError(text) from error
    finally:
        signal.signal(signal.SIGPROF, before)
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
        if measured:
            tracemalloc.stop()
    if peak > MAX_MEMORY:
        raise BadInputError(f"{target.name}: took {peak} bytes for the input {data!r}")


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {MAX_SECONDS:g} s")
