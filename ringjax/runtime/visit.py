"""The former name of `ringjax.runtime.reused_process`, until the next release."""

from __future__ import annotations

import warnings
from typing import Any

from ringjax.runtime.reused_process import run_as_rank


def visit(*args: Any, **kwargs: Any) -> object:
    """Calls `run_as_rank` with a warning."""
    text = "call ringjax.runtime.reused_process.run_as_rank instead of visit"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return run_as_rank(*args, **kwargs)
