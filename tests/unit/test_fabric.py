"""Tests of RINGJAX_FABRIC before links are made: the probe, the hello, the sockets.

A fake replaces libfabric. tests/ranks/test_fabric.py uses the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fabric import NO_LIBRARY, NO_PROVIDER, probed
from support.link_ranks import Ranks, world

from ringjax import _native
from ringjax.config import Config
from ringjax.errors import StartupError
from ringjax.links import fabric
from ringjax.membership import assembly
from ringjax.world.hello import create_hello

__all__ = ["probed", "world"]  # fixtures


@pytest.mark.parametrize(
    ("probe", "texts"),
    [
        (NO_LIBRARY, ["cannot open shared", "apt-get install libfabric1"]),
        (NO_PROVIDER, ["it has efa, tcp: set RINGJAX_FABRIC to one of these"]),
    ],
    ids=["library", "provider"],
)
def test_a_missing_library_or_provider_is_an_error(
    probed: dict[str, Any], probe: dict[str, Any], texts: list[str]
) -> None:
    probed.update(probe)
    config = Config(fabric="verbs", hostname="node7")
    with pytest.raises(StartupError) as caught:
        create_hello(3, 8, config)
    said = str(caught.value)
    for text in ("rank 3 on node7 has RINGJAX_FABRIC=verbs, but", *texts):
        assert text in said
    assert "RINGJAX_FABRIC=off for TCP" in said and "RINGJAX_FABRIC_LIBRARY" in said


def test_a_rank_without_peers_loads_no_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "fabric_probe", None)
    assert "fabric" not in create_hello(0, 1, Config(fabric="verbs"))
    assert "fabric" not in create_hello(0, 2, Config())


def test_the_card_may_differ_between_ranks(probed: dict[str, Any]) -> None:
    here, there = (
        create_hello(rank, 2, Config(fabric=f"efa:card{rank}")) for rank in range(2)
    )
    assert here["settings"] == there["settings"]
    assert here["settings"]["fabric"] == "efa"
    assert not assembly.mismatch(there, "rank 1", here, "rank 0")


def test_ranks_with_different_providers_are_refused(probed: dict[str, Any]) -> None:
    here = create_hello(0, 2, Config(fabric="tcp", hostname="one"))
    probed.update(provider="tcp;ofi_rxm", version=(1, 17), path="/usr/lib/old")
    there = create_hello(1, 2, Config(fabric="tcp", hostname="two"))
    text = assembly.mismatch(there, "rank 1", here, "rank 0")
    for words in (
        "rank 1 on two uses tcp;ofi_rxm (protocol 11) of libfabric 1.17 (/usr",
        "rank 0 on one uses efa (protocol 11) of libfabric 2.5 (/opt/",
        "they do not understand each other",
    ):
        assert words in text
    off = create_hello(1, 2, Config())
    text = assembly.mismatch(off, "rank 1", here, "rank 0")
    assert "RINGJAX_FABRIC must be alike on all ranks: it is 'tcp'" in text
    assert "'off' on rank 1" in text
    there["fabric"] = "hostile"
    assert not assembly.mismatch(there, "rank 1", here, "rank 0")


def test_only_pairs_between_hosts_have_one_socket(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 1, 0), fabric="tcp", tcp_streams=3, shm=False)
    sockets = {
        (rank, peer): len(fds)
        for rank, links in enumerate(ranks.build())
        for peer, fds, _ in links.links
    }
    far, near = [(0, 1), (1, 0), (1, 2), (2, 1)], [(0, 2), (2, 0)]
    assert sockets == dict.fromkeys(far, 1) | dict.fromkeys(near, 3)


def test_the_address_of_the_chosen_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"eth0": ["fe80::1", "10.0.0.7"], "six": ["fd00::2"]}
    monkeypatch.setattr(fabric.address, "by_interface", lambda: places)
    for names, expected in (("", ""), ("eth0", "10.0.0.7"), ("six", "fd00::2")):
        config = Config(fabric="tcp", network_interfaces=names)
        assert fabric.options(config, 1) is not None
        assert fabric.source_address(config) == expected
    with pytest.raises(StartupError, match=r"RINGJAX_NETWORK_INTERFACES: .*'ib0'"):
        fabric.source_address(Config(network_interfaces="ib0"))
