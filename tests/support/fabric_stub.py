"""Builds the stub of libfabric (tests/ofi_stub), and makes the ranks of a job load it.

Tests on the stub are not tests of a network card. They check how ringjax calls
libfabric when a card refuses, reorders, fails or falls silent.
"""

from __future__ import annotations

import functools
import re

import pytest

from support import native_build

_SOURCES = native_build.ROOT / "tests" / "ofi_stub"


@functools.cache
def _settings() -> set[str]:
    text = "".join(file.read_text() for file in sorted(_SOURCES.glob("*.[hc]*")))
    return set(re.findall(r"OFI_STUB_[A-Z_]+", text))


def fabric_stub_environment(**settings: str | int) -> dict[str, str]:
    """Returns the variables of a job whose hosts are connected by the stub.

    Args:
      **settings: settings of the stub for all ranks, such as `OFI_STUB_REORDER=1`.
    """
    unknown = settings.keys() - _settings()
    assert not unknown, f"the stub has no {sorted(unknown)}"
    try:
        library = native_build.build("ofi_stub") / "ofi_stub" / "libfabric.so.1"
    except native_build.BuildError as error:
        pytest.fail(str(error), pytrace=False)
    return {
        "RINGJAX_FABRIC": "stub",
        "RINGJAX_FABRIC_LIBRARY": str(library),
        "RINGJAX_CALIBRATE": "off",
        **{name: str(value) for name, value in settings.items()},
    }
