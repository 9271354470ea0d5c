"""Parsers: functions that convert the text of an environment variable to a value.

A parser raises a ValueError whose text describes the expected value, for example "an
integer". config.py adds the name and the text of the variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
_PROVIDER = r"[a-z][a-z0-9_]*(;[a-z0-9_]+)*"  # the second name is that of a layer

Parser = Callable[[str], object]


def integer(low: int, high: int | None = None) -> Parser:
    """Returns a parser of integers from `low` to `high`; None means no upper limit."""
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
    """Returns a parser that reads "all" as 0, and passes other texts to `parse`."""

    def parse_or_all(text: str) -> object:
        if text.strip().lower() == "all":
            return 0
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"all, or {error}") from None

    return parse_or_all


def seconds(low: float = 0.0, unit: str = "seconds") -> Parser:
    """Returns a parser of a number of seconds, or of another unit, that is >= `low`."""
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
    """Returns a parser of multiples of `unit` from 0 to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or (n := int(text)) > high or n % unit:
            raise ValueError(f"a multiple of {unit} up to {high}")
        return n

    return parse


def power_of_two(low: int, high: int) -> Parser:
    """Returns a parser of powers of two from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= (n := int(text)) <= high or n & (n - 1):
            raise ValueError(f"a power of two between {low} and {high}")
        return n

    return parse


def boolean(text: str) -> bool:
    """Parses 1, true, on or yes as True, and 0, false, off or no as False."""
    values = {"1": True, "true": True, "on": True, "yes": True}
    values |= {"0": False, "false": False, "off": False, "no": False}
    if text.lower() not in values:
        raise ValueError("1 or 0")
    return values[text.lower()]


def if_true(value: object) -> Parser:
    """Returns a parser that returns `value` for a true text, None for a false text."""
    return lambda text: value if boolean(text) else None


def hexadecimal(digits: int, *, exactly: bool) -> Parser:
    """Returns a parser of texts with exactly (or at least) `digits` hex digits."""
    size = f"{digits}" if exactly else f"at least {digits}"

    def parse(text: str) -> str:
        plain = all(c in "0123456789abcdefABCDEF" for c in text) and len(text) % 2 == 0
        right = len(text) == digits if exactly else len(text) >= digits
        if not (plain and right):
            raise ValueError(f"{size} hexadecimal digits")
        return text.lower()

    return parse


def choice(*names: str, **synonyms: str) -> Parser:
    """Returns a parser of the words `names` and their synonyms, in any case."""

    def parse(text: str) -> str:
        name = synonyms.get(text.lower(), text.lower())
        if name not in names:
            raise ValueError("one of " + ", ".join(names))
        return name

    return parse


def fabric(text: str) -> str:
    """Parses off, or the name of a provider of libfabric, with :DOMAIN or without.

    A domain is a card, and its name may have capital letters.

    Example:
        >>> fabric("EFA:rdmap0s6-rdm"), fabric("tcp;ofi_rxm"), fabric("0")
        ('efa:rdmap0s6-rdm', 'tcp;ofi_rxm', 'off')
    """
    name, colon, domain = text.partition(":")
    name = name.lower()
    if text.lower() in ("off", "0", "false", "no"):
        return "off"
    is_switch = name in ("on", "true", "yes", "auto")
    if is_switch or bool(colon) != bool(domain) or not re.fullmatch(_PROVIDER, name):
        raise ValueError("off, or a provider such as verbs, efa or efa:DOMAIN")
    return name + colon + domain


level = choice(*LOG_LEVELS, warn="warning")
