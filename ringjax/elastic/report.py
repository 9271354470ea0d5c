"""Lines for the user, in the form of all lines of ringjax."""

from __future__ import annotations

import sys

from ringjax import runtime


def say(level: str, text: str) -> None:
    """Prints the line if `level` is wanted; warnings also outside of a job."""
    if runtime.is_initialized():
        runtime.current("elastic").log(level, f"elastic: {text}")
    elif level == "warning":
        print(f"[ringjax] warning: elastic: {text}", file=sys.stderr, flush=True)
