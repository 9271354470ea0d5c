"""Tests of name lookups with a slow name server: concurrent, and once for each name."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from ringjax.run.hosts import name_lookup, slots


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "_lookups", {})
    monkeypatch.setattr(name_lookup, "_announced", set())


def test_lookups_run_concurrently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each lookup waits until all four have started."""
    hosts, asked = ["a", "b", "c", "d"], []
    together = threading.Barrier(4)

    def slow(name: str, port: object, **kinds: Any) -> Any:
        asked.append(name)
        together.wait(30)
        if name == "d":
            raise socket.gaierror(-2, "Name or service not known")
        address = f"192.0.2.{ord(name) - ord('a') + 1}"
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    found = slots.merge_aliases([slots.HostSlots(name, 1) for name in hosts])
    assert [host.name for host in found] == hosts
    assert not slots.is_local("d") and name_lookup.addresses("d") == []
    assert name_lookup.addresses("a")[0][4] == ("192.0.2.1", 9)
    assert sorted(asked) == hosts
    assert "name server" not in capfd.readouterr().err


def test_a_slow_lookup_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, seen = threading.Event(), []
    monkeypatch.setattr(name_lookup, "_WARN_AFTER", 0.0)

    def hear(text: str) -> None:
        seen.append(text)
        answer.set()

    monkeypatch.setattr(name_lookup.stderr, "line", hear)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(30) and [])
    name_lookup.start(["far", "other"])
    assert name_lookup.addresses("far") == name_lookup.addresses("other") == []
    assert seen == ["ringrun: waiting for the name server to answer for far, other"]


def test_names_with_one_address_are_merged_per_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the merge, two ranks of a host would get one local rank and one GPU."""
    known = {"n1": "192.0.2.1", "n1.cluster": "192.0.2.1", "n2": "192.0.2.2"}

    def find(name: str, port: object, **kinds: Any) -> Any:
        if name not in known:  # a name that only ssh can resolve
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (known[name], port))]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    given = "n1:2,n2:1,n1.cluster:3,a@n1:1,a@n1.cluster:1,b@n1:1,far:1,farther:1"
    found = slots.merge_aliases(slots.parse_hosts(given))
    assert [(host.name, host.slots) for host in found] == [
        ("n1", 5), ("n2", 1), ("a@n1", 2), ("b@n1", 1), ("far", 1), ("farther", 1),
    ]  # fmt: skip
