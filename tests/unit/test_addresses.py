"""Addresses: how they are written, and which ones this machine has."""

from __future__ import annotations

import pytest

from ringjax.control import addresses


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h:1", [("h", 1)]),
        ("10.0.0.1:80,[::1]:81", [("10.0.0.1", 80), ("::1", 81)]),
        ("a:1,,b:2,", [("a", 1), ("b", 2)]),
    ],
)
def test_addresses(text: str, found: list[tuple[str, int]]) -> None:
    assert addresses.parse(text) == found
    assert addresses.parse(",".join(addresses.show(*a) for a in found)) == found


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "h:0", "h:65536", "h:²"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        addresses.parse(text)


def test_interfaces() -> None:
    found = addresses.of_interfaces()
    assert "127.0.0.1" in found
    assert addresses.of_interfaces("lo")[0].startswith("127.")
    with pytest.raises(
        ValueError, match=r"'nothere0' does not exist .* this host has lo"
    ):
        addresses.of_interfaces("lo,nothere0")
