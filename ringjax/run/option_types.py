"""Numbers on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def number(kind: type, low: float) -> Callable[[str], Any]:
    """Reads one that is at least `low`, for argparse.

    Example:
        >>> number(int, 1)("3")
        3
    """

    def parse(text: str) -> Any:
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low:g}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"  # in argparse's error
    return parse
