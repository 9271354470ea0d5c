"""The former name of `ringjax.runtime.reused_process`."""

from __future__ import annotations

import warnings

from ringjax.runtime.reused_process import run_as_rank as visit

__all__ = ["visit"]

warnings.warn(
    "ringjax.runtime.visit.visit is ringjax.runtime.reused_process.run_as_rank now",
    DeprecationWarning,
    stacklevel=2,
)
