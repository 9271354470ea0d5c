"""Tests of fitting the cost model to given times. tests/ranks measures real times."""

from __future__ import annotations

from typing import Any

import pytest

from ringjax import _native
from ringjax.control.member import Member
from ringjax.links import calibration
from ringjax.links.cost_cache import NAMES

HOSTS = [[0, 1], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 1], [0, 1, 0, 1]]


def times_for(hosts: list[int], cost: dict[str, float]) -> dict[str, float]:
    """Returns the times that calibration measures on a network with these costs."""
    return {
        algorithm: sum(cost[name] * count for name, count in row.items())
        for algorithm, row in calibration._coefficients(hosts).items()
    }


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("latency", [5e-6, 40e-6, 2e-3])
@pytest.mark.parametrize("share", [0.1, 0.5, 3.0])
def test_calibration_finds_the_constants_of_a_model_network(
    hosts: list[int], latency: float, share: float
) -> None:
    cost = dict.fromkeys(NAMES, 1e-9)
    cost |= {"local_latency": 2e-6, "local_message": 1e-6}
    cost |= {"remote_latency": latency, "remote_message": share * latency}
    times = times_for(hosts, cost)
    found = calibration.fit(times, calibration._coefficients(hosts))
    assert found.keys() >= {"remote_latency", "remote_message"}
    predicted = times_for(hosts, cost | found)
    assert predicted == pytest.approx(times, rel=0.05)
    if len(hosts) > 2:  # with two ranks all algorithms cost the same
        names = ("remote_latency", "remote_message")
        assert [found[n] for n in names] == pytest.approx(
            [cost[n] for n in names], rel=0.1
        )


@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0, 0]], ids=str)
def test_one_host_gives_only_local_constants(hosts: list[int]) -> None:
    cost = dict.fromkeys(NAMES, 1e-5)
    found = calibration.fit(times_for(hosts, cost), calibration._coefficients(hosts))
    assert found.keys() == {"local_latency", "local_message"}
    assert all(value > 0 for value in found.values())


def test_random_times_give_valid_constants() -> None:
    hosts = HOSTS[2]
    rows = calibration._coefficients(hosts)
    for fast in rows:
        times = {name: 1e-6 if name == fast else 1e-2 for name in rows}
        found = calibration.fit(times, rows)
        assert found
        assert all(0 < value < 1 for value in found.values())
        _native.predict("allreduce", 1 << 20, hosts, found)  # the core accepts them


def test_the_algorithm_depends_on_the_constants() -> None:
    def best(size: int, **cost: float) -> str:
        seconds = dict(_native.predict("allreduce", size, HOSTS[2], cost))
        return min(seconds, key=lambda name: seconds[name])

    assert best(4096, remote_latency=100e-6, remote_message=1e-6) == "direct"
    assert best(4096, remote_latency=10e-6, remote_message=100e-6) == "tree"
    assert best(64 << 20, remote_byte=8e-9) == "hierarchical"


def test_the_core_refuses_bad_constants() -> None:
    [alone] = _native.local_world([0])
    defaults = alone.cost
    assert defaults.keys() == set(NAMES)
    alone.set_cost({"remote_byte": 5e-9})
    assert alone.cost == defaults | {"remote_byte": 5e-9}
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive number"):
            alone.set_cost({"remote_byte": wrong})
    with pytest.raises(ValueError, match="unknown cost"):
        alone.set_cost({"remote_bytes": 1.0})
    assert alone.cost["remote_byte"] == 5e-9
    alone.set_cost({})
    assert alone.cost == defaults


def test_a_network_is_described_by_hosts_and_transport() -> None:
    def describe(hosts: str, *, shm: bool = True, **more: object) -> Any:
        own = {"machine": "m", "version": "1", "addresses": "10.0.0.1:4000"}
        names = list(dict.fromkeys(hosts))
        members = [
            Member(rank, rank, names.index(name), name, shm or rank == 0)
            for rank, name in enumerate(hosts)
        ]
        return calibration.describe_network(members, own | more)

    assert describe("aa") is None
    only = Member(0, 0, 0, "a", shm=False)
    assert calibration.describe_network([only], {}) is None
    networks = [
        describe("aa", shm=False),
        *(describe(hosts) for hosts in ("ab", "ac", "abb")),
        describe("ab", version="2"),
        describe("ab", settings={"tcp_streams": 2}),
        describe("ab", machine="n"),
        describe("ab", addresses="10.0.1.1:9,[::2]:9"),
    ]
    assert None not in networks
    assert len({str(network) for network in networks}) == len(networks)
    # A network keeps its identity although ports differ at every start.
    assert describe("ab", addresses="10.0.0.1:77") == networks[1]
