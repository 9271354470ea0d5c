"""Tests of parsing and printing addresses, and of this machine's own addresses."""

from __future__ import annotations

import threading

import pytest

from ringjax.control import addresses
from ringjax.errors import StartupError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h:1", [("h", 1)]),
        ("10.0.0.1:80,[::1]:81", [("10.0.0.1", 80), ("::1", 81)]),
        ("a:1,,b:2,", [("a", 1), ("b", 2)]),
    ],
)
def test_parse_and_show_addresses(text: str, found: list[tuple[str, int]]) -> None:
    assert addresses.parse(text) == found
    assert addresses.parse(",".join(addresses.show(*a) for a in found)) == found


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "h:0", "h:65536", "h:²"])
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        addresses.parse(text)


def test_addresses_of_interfaces() -> None:
    found = addresses.of_interfaces()
    assert "127.0.0.1" in found
    assert addresses.of_interfaces("lo")[0].startswith("127.")
    with pytest.raises(
        ValueError, match=r"'nothere0' does not exist .* this host has lo"
    ):
        addresses.of_interfaces("lo,nothere0")


NOWHERE = "203.0.113.9"  # reserved for documentation (RFC 5737): no interface has it


def test_listening_skips_missing_addresses() -> None:
    for hosts in ([NOWHERE, "127.0.0.1"], ["127.0.0.1", NOWHERE]):
        (sock,) = addresses.listen_on(hosts)
        with sock:
            assert sock.getsockname()[0] == "127.0.0.1"
    for hosts in ([NOWHERE], [NOWHERE, NOWHERE]):
        with pytest.raises(StartupError, match=f"cannot listen on {NOWHERE}:0"):
            addresses.listen_on(hosts)


def test_listening_waits_for_a_taken_port() -> None:
    with addresses.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: Address already"):
            addresses.listen_on(["127.0.0.1"], port)
        timer = threading.Timer(0.3, taken.close)
        timer.start()
        (sock,) = addresses.listen_on(["127.0.0.1"], port, timeout=20)
        sock.close()
        timer.join()
