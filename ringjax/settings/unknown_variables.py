"""Warns about environment variables that look like settings but have no effect."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from ringjax import config

# Prefixes of variables that tests, benchmarks, examples and the build read.
_FOREIGN_PREFIXES = (
    "RINGJAX_TEST_",
    "RINGJAX_GPU_CHECK_",
    "RINGJAX_BENCH",
    "RINGJAX_EXAMPLE",
    "RINGJAX_CUDA",
    "RINGJAX_NVCC",
)


def unknown_variable_warnings(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a sentence for each RINGJAX_* variable that is no setting.

    Example:
        >>> unknown_variable_warnings({"RINGJAX_RANKS": "0", "RINGJAX_SIZE": "1"})
        ['RINGJAX_RANKS has no effect; is it RINGJAX_RANK?']
    """
    import difflib  # here, because ringrun imports this module and must start fast

    known = sorted(field.name.upper() for field in dataclasses.fields(config.Config))
    warnings = []
    for name, text in sorted(environ.items()):
        is_setting = name.startswith("RINGJAX_")
        is_foreign = name.startswith(_FOREIGN_PREFIXES)
        word = name.removeprefix("RINGJAX_")
        if is_setting and not is_foreign and text.strip() and word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"; is it RINGJAX_{near[0]}?" if near else ""
            warnings.append(f"{name} has no effect{hint}")
    return warnings
