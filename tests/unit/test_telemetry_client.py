"""Tests of the telemetry client with a simulated agent."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import LONG

from ringjax import _native
from ringjax.config import Config
from ringjax.monitor import sockets
from ringjax.world import telemetry_client
from ringjax.world.rank_info import RankInfo
from ringjax.world.telemetry_client import TelemetryClient
from ringjax.world.time_spent import TimeSpent

INTERVAL = 0.5  # seconds between two samples


class Agent:
    """Listens on an abstract unix socket, and reads the lines of one client."""

    def __init__(self) -> None:
        self.name = f"ringjax-test-{os.getpid()}-{time.monotonic_ns()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._lines: Any = None

    def accept(self) -> None:
        self._listener.settimeout(LONG)
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(LONG)
        self._lines = self._connection.makefile("rb")
        assert self.read() == {"id": 3}

    def ask(self, seconds: float) -> None:
        assert self._connection is not None
        self._connection.sendall(f"{seconds}\n".encode())

    def read(self) -> dict[str, Any] | None:
        line = self._lines.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        if self._connection is not None:
            self._lines.close()
            self._connection.close()
        self._listener.close()


@pytest.fixture(autouse=True)
def no_member(monkeypatch: pytest.MonkeyPatch) -> TimeSpent:
    """Hides from the telemetry client that this process was a member before."""
    spent = TimeSpent()
    monkeypatch.setattr(telemetry_client, "spent", spent)
    return spent


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def source() -> Any:
    epoch = SimpleNamespace(
        config=Config(),
        rank_info=RankInfo.from_hosts(0, ["here"]),
        number=0,
        communicators={},
        hostname_of=lambda rank: "here",
    )
    recorder = _native.Recorder(16, "rank 0", "")
    return SimpleNamespace(recorder=recorder, tuned="", current_epoch=epoch)


def test_samples_after_a_pause_wait_for_the_next_interval(
    agent: Agent,
) -> None:
    client = TelemetryClient(source(), agent.name, 3)
    try:
        agent.accept()
        agent.ask(INTERVAL)
        assert agent.read()
        agent.ask(0)
        time.sleep(1.5 * INTERVAL)  # the time of the next sample has passed
        # Request samples half an interval before the time at which all ranks sample.
        time.sleep(INTERVAL - (time.time() - INTERVAL / 2) % INTERVAL)
        moment = (time.time() // INTERVAL + 1) * INTERVAL
        agent.ask(INTERVAL)
        assert agent.read()
        assert time.time() >= moment
    finally:
        client.close()


@pytest.fixture
def member(no_member: TimeSpent, monkeypatch: pytest.MonkeyPatch) -> TimeSpent:
    """Makes this process a member of a job, only for the telemetry client."""
    no_member.begin(_native.Recorder(16, "rank 0", ""))
    monkeypatch.setattr(telemetry_client, "_MIN_REPORT_INTERVAL", 0.1)
    return no_member


def test_time_reports_are_sent_although_nobody_watches(
    agent: Agent, member: TimeSpent
) -> None:
    client = TelemetryClient(source(), agent.name, 3)
    try:
        agent.accept()
        first, second = agent.read(), agent.read()
        assert first and second and first["time"]["age"] < second["time"]["age"]
    finally:
        client.close()
    *_, last = iter(agent.read, None)
    assert last["time"]["last"]


def test_close_during_connect_ends_the_client(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, closed = threading.Event(), threading.Event()
    connect = sockets.connect_within

    def connect_slowly(*arguments: Any) -> None:
        connecting.set()
        assert closed.wait(LONG)
        connect(*arguments)

    monkeypatch.setattr(telemetry_client.sockets, "connect_within", connect_slowly)
    client = TelemetryClient(source(), agent.name, 3)
    assert connecting.wait(LONG)
    client.close()
    closed.set()
    agent.accept()
    assert agent.read() is None
    client._thread.join(LONG)
    assert not client._thread.is_alive()
