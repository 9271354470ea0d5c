"""Tests of the doctor's check of RINGJAX_FABRIC. A fake replaces libfabric."""

from __future__ import annotations

from typing import Any

import pytest
from support.fabric import NO_LIBRARY, probed

from ringjax.doctor import fabric
from ringjax.doctor.findings import FAIL, OK, WARN, HostContext

__all__ = ["probed"]  # a fixture


def look(**environ: str) -> list[tuple[str, str]]:
    """Returns status and text of each finding of the doctor on one of two hosts."""
    variables = {f"RINGJAX_{name.upper()}": value for name, value in environ.items()}
    host = HostContext(
        name="node1", ranks=4, size=8, hosts=["node1", "node2"], environ=variables
    )
    return [(found.status, found.text) for found in fabric.provider(host)]


def test_the_doctor_is_silent_without_the_setting(probed: dict[str, Any]) -> None:
    assert look() == look(fabric="auto") == []


def test_the_doctor_names_library_and_card(
    probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda which: (-1, -1))
    text = "efa on rdmap0s6-rdm, by libfabric 2.5 (/opt/libfabric.so.1)"
    assert look(fabric="efa") == [(OK, text)]


def test_the_doctor_finds_a_low_limit_of_pinned_memory(
    probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    low = (64 << 10, 64 << 10)
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda which: low)
    (status, text), _ = look(fabric="efa")
    assert status == FAIL and "may pin 64 KiB (ulimit -l)" in text
    probed["provider"] = "tcp;ofi_rxm"
    assert [status for status, _ in look(fabric="tcp")] == [OK]


def test_the_doctor_asks_for_a_vni_of_slingshot(
    probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda which: (-1, -1))
    probed["provider"] = "cxi"
    [(status, text), _] = look(fabric="cxi")
    assert status == WARN and "VNI" in text


def test_the_doctor_says_what_to_install(probed: dict[str, Any]) -> None:
    probed.update(NO_LIBRARY)
    [(status, text)] = look(fabric="verbs")
    assert status == FAIL and text.startswith("node1 has RINGJAX_FABRIC=verbs, but")
