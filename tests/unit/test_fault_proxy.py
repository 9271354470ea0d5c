"""Tests of joining a coordinator through slow, damaging, and silent networks.

A rank joins or raises an error in time. Damaged data are detected, and the server
continues to serve. Each test runs with plain and, if Python supports it, TLS links.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fault_proxy import Fault, FaultProxy, every_fault
from support.handshakes import needs_tls
from support.waiting import LONG

from ringjax.control import addresses
from ringjax.errors import AuthenticationError, StartupError
from ringjax.membership.client import CoordinatorClient
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

SECRET, JOB = b"s" * 32, "0123456789abcdef"
# The sizes of the handshake in bytes from caller to server, and back.
HANDSHAKE_UP, HANDSHAKE_DOWN = 100, 97
# The additional bytes with TLS from caller to server, and back.
TLS_UP, TLS_DOWN = 343, 225


@pytest.fixture(params=["off", pytest.param("required", marks=needs_tls)])
def server(request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    server = Coordinator(
        *(SECRET, JOB),
        np=1,
        on_loss="stop",
        start_timeout=LONG,
        log=lambda text: None,
        tls=request.param,
    )
    server.start()
    yield server
    server.close()


def _join(
    server: Coordinator, proxy: FaultProxy, seconds: float = 3.0
) -> CoordinatorClient:
    hello = {"rank": 0, "size": 1, "name": "x" * 40}
    return join(
        JobCredentials(addresses.show(*proxy.address), SECRET, JOB), 0, hello, seconds
    )


def _target(server: Coordinator) -> tuple[str, int]:
    return addresses.parse(server.addresses[0])[0]


@pytest.mark.parametrize(
    "fault",
    [Fault(delay=0.05), Fault(rate=2000.0), Fault(drip=1), Fault(drip=7, delay=0.005)],
    ids=["delay", "rate", "bytes one by one", "slow pieces"],
)
def test_joining_through_a_slow_network(server: Coordinator, fault: Fault) -> None:
    with FaultProxy(_target(server), up=fault, down=fault) as proxy:
        client = _join(server, proxy, LONG)
        assert client.exchange("value", LONG, "a value") == ["value"]
        client.close()


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.timeout(120)
def test_damaged_connections_are_refused(
    server: Coordinator, direction: str, request: pytest.FixtureRequest
) -> None:
    size = HANDSHAKE_UP if direction == "up" else HANDSHAKE_DOWN
    step = 7
    if request.node.callspec.params["server"] == "required":
        size, step = size + (TLS_UP if direction == "up" else TLS_DOWN), 29
    faults = [f for at, f in enumerate(every_fault(size + 60)) if at % step == 0]
    for what, fault in faults:
        where = {direction: fault}
        with (
            FaultProxy(_target(server), **where) as proxy,
            pytest.raises((AuthenticationError, StartupError)),
        ):
            _join(server, proxy, 0.3).exchange("v", 0.3, "a value")
            pytest.fail(f"{what} ({direction}) was not noticed")
    with FaultProxy(_target(server)) as proxy:  # the server continues
        _join(server, proxy).close()


def test_joining_through_a_silent_network_times_out(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of `join` also holds if it is less than the handshake's timeout."""
    monkeypatch.setattr("ringjax.control.connecting.HANDSHAKE_TIMEOUT", 3600.0)
    with (
        FaultProxy(_target(server), down=Fault(stall_after=40)) as proxy,
        pytest.raises(StartupError),
    ):
        _join(server, proxy, 1.0)
