"""Variables that look like settings and that nothing reads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from ringjax import config

# What begins like this is read by tests, benchmarks and examples, and by the build.
_OTHERS = (
    "RINGJAX_TEST_",
    "RINGJAX_GPU_CHECK_",
    "RINGJAX_BENCH",
    "RINGJAX_EXAMPLE",
    "RINGJAX_CUDA",
    "RINGJAX_NVCC",
)


def misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that looks like ours and that nothing reads.

    Example:
        >>> misspelt({"RINGJAX_COLLECTIV_TIMEOUT": "9", "RINGJAX_RANK": "0"})
        ['RINGJAX_COLLECTIV_TIMEOUT has no effect; is it RINGJAX_COLLECTIVE_TIMEOUT?']
    """
    import difflib  # rarely needed, and ringrun is to start in a moment

    known = sorted(field.name.upper() for field in dataclasses.fields(config.Config))
    found = []
    for name, text in sorted(environ.items()):
        ours = name.startswith("RINGJAX_") and not name.startswith(_OTHERS)
        word = name.removeprefix("RINGJAX_")
        if ours and text.strip() and word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"; is it RINGJAX_{near[0]}?" if near else ""
            found.append(f"{name} has no effect{hint}")
    return found
