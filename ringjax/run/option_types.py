"""Types of options on the command line, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from ringjax.config import Config

ValueT = TypeVar("ValueT", int, float)


def number(kind: type[ValueT], low: float) -> Callable[[str], ValueT]:
    """Returns an argparse type for numbers that are at least `low`.

    Example:
        >>> number(int, 1)("3")
        3
    """

    def parse(text: str) -> ValueT:
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low:g}")
        return value

    # argparse puts the name into its error: "invalid whole number value: 'x'".
    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def devices(text: str) -> str:
    """Checks a number of CUDA devices per rank, and returns the text of the setting."""
    try:
        Config.from_env({"RINGJAX_DEVICES_PER_RANK": text})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
