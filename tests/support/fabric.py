"""Finds libfabric for tests that carry tensors by its provider `tcp`, without a card.

`make test` installs the wheel `mpich`, which contains a libfabric, into a folder of its
own: in the environment, its `mpiexec` would stand before those of other packages.
"""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

_WHEEL = Path(sys.prefix, "libfabric", "lib", "mpich", "libfabric.so.1")


def library() -> str:
    """Returns the path of libfabric, its name if the loader finds it, or ""."""
    if named := os.environ.get("RINGJAX_FABRIC_LIBRARY"):
        return named
    if _WHEEL.exists():
        return str(_WHEEL)
    # Loading it here would let it set handlers of signals in the process of the tests.
    return find_library("fabric") or ""


needs_fabric = pytest.mark.skipif(
    not library(),
    reason="no libfabric: make test fetches one, or set RINGJAX_FABRIC_LIBRARY",
)


def fabric_env(provider: str = "tcp", **settings: str) -> dict[str, str]:
    """Returns the variables of a job whose hosts are connected by libfabric."""
    variables = {"FABRIC": provider, "FABRIC_LIBRARY": library(), "CALIBRATE": "off"}
    variables |= {name.upper(): text for name, text in settings.items()}
    return {f"RINGJAX_{name}": text for name, text in variables.items()}


# The dict that `_native.fabric_probe` returns on a host with a card for EFA.
PROBED = {
    "provider": "efa",
    "protocol": 0xB,
    "version": (2, 5),
    "path": "/opt/libfabric.so.1",
    "domain": "rdmap0s6-rdm",
    "providers": ["efa", "tcp"],
    "error": "",
}
NO_LIBRARY = dict.fromkeys(PROBED, "") | {
    "protocol": 0,
    "providers": [],
    "error": "libfabric.so.1: cannot open shared object file",
}
NO_PROVIDER = PROBED | {"error": "no provider 'verbs'; it has efa, tcp"}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the result of the fake probe, which a test may change."""
    found: dict[str, Any] = dict(PROBED)
    monkeypatch.setattr("ringjax._native.fabric_probe", lambda *args: found)
    return found
