"""How the text of an environment variable becomes a value.

Each function here gives or is a parser; its ValueError says what is expected, and
config.py puts the variable and its text before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")

Parser = Callable[[str], Any]


def integer(low: int, high: int | None = None) -> Parser:
    """A whole number within limits."""
    limits = f"at least {low}" if high is None else f"between {low} and {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("an integer") from None
        if value < low or (high is not None and value > high):
            raise ValueError(f"an integer {limits}")
        return value

    return parse


def or_all(parse: Parser) -> Parser:
    """What `parse` takes, or "all", which is 0."""

    def either(text: str) -> Any:
        if text.strip().lower() == "all":
            return 0
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"all, or {error}") from None

    return either


def seconds(low: float = 0.0, unit: str = "seconds") -> Parser:
    """A number of seconds, or of what `unit` says."""
    expected = f"a number of {unit}, at least {low:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= value < 1e9:  # also refuses nan and inf
            raise ValueError(expected)
        return value

    return parse


def multiple_of(unit: int, high: int) -> Parser:
    """A multiple of `unit`, zero too."""

    def parse(text: str) -> int:
        if not text.isdecimal() or (n := int(text)) > high or n % unit:
            raise ValueError(f"a multiple of {unit} up to {high}")
        return n

    return parse


def power_of_two(low: int, high: int) -> Parser:
    """A power of two within limits."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= (n := int(text)) <= high or n & (n - 1):
            raise ValueError(f"a power of two between {low} and {high}")
        return n

    return parse


def boolean(text: str) -> bool:
    """1 or 0, in the words that people have for it."""
    values = {"1": True, "true": True, "on": True, "yes": True}
    values |= {"0": False, "false": False, "off": False, "no": False}
    if text.lower() not in values:
        raise ValueError("1 or 0")
    return values[text.lower()]


def if_true(value: Any) -> Parser:
    """For Horovod's switches that stand for one value of ours."""
    return lambda text: value if boolean(text) else None


def hexadecimal(digits: int, *, exactly: bool) -> Parser:
    """So many hexadecimal digits, or at least so many."""
    size = f"{digits}" if exactly else f"at least {digits}"

    def parse(text: str) -> str:
        plain = all(c in "0123456789abcdefABCDEF" for c in text) and len(text) % 2 == 0
        right = len(text) == digits if exactly else len(text) >= digits
        if not (plain and right):
            raise ValueError(f"{size} hexadecimal digits")
        return text.lower()

    return parse


def level(text: str) -> str:
    """One of LOG_LEVELS."""
    level = "warning" if text.lower() == "warn" else text.lower()
    if level not in LOG_LEVELS:
        raise ValueError("one of " + ", ".join(LOG_LEVELS))
    return level


def choice(*names: str) -> Parser:
    """One of these words."""

    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError("one of " + ", ".join(names))
        return text.lower()

    return parse
