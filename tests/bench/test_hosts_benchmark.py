"""Tests of benchmarks/hosts/ without namespaces: bounds, options, commands, tables.

No test makes a namespace, starts a rank or measures time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import namespaces
from support.namespaces import Namespaces, address

from benchmarks.hosts import collectives
from benchmarks.hosts.layouts import Layout, parse_rate, parse_size
from benchmarks.peers.adapter import COLLECTIVES
from ringjax.config import Config
from ringjax.control.launch_environment import detect_launch

MIB = 1 << 20

# -- bounds ----------------------------------------------------------------------------


def test_bounds_of_four_hosts() -> None:
    def bounds(layout: str, rate: str, size: int = 125_000_000) -> Any:
        hosts, ranks = map(int, layout.split("x"))
        return Layout(hosts, ranks, rate).bounds("allreduce", size)

    assert bounds("4x1", "1gbit") == pytest.approx((1.5, 1.5))
    assert bounds("4x2", "1gbit") == pytest.approx((1.75, 1.5))
    assert bounds("4x2", "10gbit") == pytest.approx((0.175, 0.15))
    assert bounds("2x1", "500mbit", 62_500_000) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "ring", "least"),
    [
        ("allreduce", 1.75, 1.5),
        ("broadcast", 1.0, 1.0),
        ("allgather", 0.875, 0.75),
        ("alltoall", 1.5, 1.5),  # two ranks a host, each of which has others' parts
        ("reducescatter", 0.875, 0.75),
    ],
)
def test_bounds_of_each_collective(name: str, ring: float, least: float) -> None:
    bounds = Layout(4, 2, "1gbit").bounds(name, 125_000_000)
    assert bounds == pytest.approx((ring, least))


def test_without_a_rate_there_is_no_bound() -> None:
    for name in COLLECTIVES:
        assert Layout(4, 1).bounds(name, MIB) is None
        assert Layout.parse("loopback").bounds(name, MIB) is None


def test_plain_streams_carry_the_bytes_of_the_bound() -> None:
    words = ["--collectives", "alltoall", "broadcast", "--sizes", "4096", "16M"]
    options = collectives.parse(words)
    assert collectives.cases(Layout(2, 3), options) == [
        ("alltoall", 4080, 6120),
        ("alltoall", 16 * MIB - 16, 3 * 8 * MIB - 24),
        ("broadcast", 4080, 4080),
        ("broadcast", 16 * MIB - 16, 16 * MIB - 16),
    ]
    assert collectives.parse([]).collectives == ["allreduce"]


@pytest.mark.parametrize(
    ("none", "in_turn", "overlapped", "share"),
    [(1.0, 1.5, 1.0, 1.0), (1.0, 1.5, 1.5, 0.0), (1.0, 1.5, 1.1, 0.8), (1, 1, 1, 0)],
)
def test_share_of_the_communication_that_is_hidden(
    none: float, in_turn: float, overlapped: float, share: float
) -> None:
    assert collectives.hidden(none, in_turn, overlapped) == pytest.approx(share)


# -- options ---------------------------------------------------------------------------


def test_layouts_are_parsed() -> None:
    assert Layout.parse("4x2") == Layout(4, 2)
    assert Layout.parse("loopback").loopback
    for text in ("1x2", "0x1", "4x0", "4", "x", "4x2x1", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="no layout like 4x2"):
            Layout.parse(text)


def test_sizes_and_rates_are_parsed() -> None:
    assert [parse_size(t) for t in ("4096", "64k", "16M")] == [4096, 65536, 16 * MIB]
    assert [parse_rate(t) for t in ("1gbit", "500mbit", "none")] == [
        "1gbit",
        "500mbit",
        None,
    ]
    for text in ("0", "6", "1T", "", "-4"):
        with pytest.raises(argparse.ArgumentTypeError, match="no size"):
            parse_size(text)
    for text in ("0gbit", "1", "1gbps", "1gbit; reboot", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="no rate"):
            parse_rate(text)


def test_every_layout_has_every_rate_but_loopback_has_none() -> None:
    words = ["--layouts", "4x1", "loopback", "4x2", "--rates", "1gbit", "10gbit"]
    titles = [layout.title for layout in collectives.worlds(collectives.parse(words))]
    assert titles == [
        "2 ranks over loopback TCP, no shared memory",
        "4 hosts x 1, 1gbit",
        "4 hosts x 2, 1gbit",
        "4 hosts x 1, 10gbit",
        "4 hosts x 2, 10gbit",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "0"],
        ["--batch", "-1"],
        ["--flows", "0"],
        ["--rates", "x"],
        ["--sizes", "16"],
        ["--collectives", "x"],
    ],
)
def test_wrong_options_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        collectives.parse(words)
    assert end.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_namespaces_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="only root may make network namespaces"):
        collectives.main(["--layouts", "4x1"])


# -- ranks -----------------------------------------------------------------------------


def test_environment_of_a_rank() -> None:
    layout = Layout(3, 2, "1gbit")
    secret = "ab" * 32
    env = layout.environment(3, "0123456789abcdef", secret)
    config = Config.from_env(env)
    assert (config.rank, config.size) == (3, 6)
    assert (config.local_rank, config.local_size) == (1, 2)
    assert (config.cross_rank, config.cross_size) == (1, 3)
    assert config.hostname == "host1"
    assert config.secret_bytes() == bytes.fromhex(secret)
    info = detect_launch(config, env)
    assert not info.single_host
    assert info.rank0_host == layout.ring[0][1] == address(0)
    assert layout.ring == [(0, address(0)), (2, address(1)), (4, address(2))]


def test_loopback_is_one_host_without_shared_memory() -> None:
    env = Layout.parse("loopback").environment(1, "0123456789abcdef", "")
    config = Config.from_env(env)
    assert not config.shm
    assert detect_launch(config, env).single_host


def test_a_rank_that_fails_ends_the_world_and_shows_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import time; time.sleep(60)"
    with log.open("wb") as file:
        waits = namespaces.spawn([sys.executable, "-c", code], os.environ, file)
        fails = namespaces.spawn([sys.executable, "-c", "1 / 0"], os.environ, file)
    try:
        with pytest.raises(
            collectives.HostsError, match="(?s)rank 1 .*ZeroDivisionError"
        ):
            collectives._wait([waits, fails], 50, [log, log])
        with pytest.raises(
            collectives.HostsError, match="rank 0 has failed .no end in time"
        ):
            collectives._wait([waits], 0, [log])
    finally:
        for process in (waits, fails):
            process.kill()
            process.wait()


# -- the network -----------------------------------------------------------------------


class Machine:
    """A stand-in for `ip` and `tc` that records what they make.

    Args:
      fails: commands with this word fail.
      raises: the exception that such commands raise instead.
    """

    def __init__(self, fails: str = "", raises: BaseException | None = None) -> None:
        self.names: set[str] = set()
        self.commands: list[str] = []
        self._fails, self._raises = fails, raises

    def __call__(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        text = " ".join(command)
        self.commands.append(text)
        if self._fails and self._fails in text:
            if self._raises is not None:
                raise self._raises
            return subprocess.CompletedProcess(command, 2, "", "no such thing\n")
        match command:
            case ["ip", "link" | "netns", "add", name, *_]:
                self.names.add(name)
            case ["ip", "link" | "netns", "del", name]:
                if name not in self.names:
                    return subprocess.CompletedProcess(command, 1, "", "not there")
                self.names.remove(name)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a network of three hosts on a machine."""

    def make(machine: Machine) -> Namespaces:
        monkeypatch.setattr(namespaces, "_call", machine)
        made = Namespaces(3, "1gbit", "test")
        monkeypatch.setattr(made, "left", lambda: sorted(machine.names))
        return made

    return make


def test_the_network_exists_only_inside_the_context(network: Any) -> None:
    machine = Machine()
    with network(machine) as made:
        names = {"rjbtest", *made.names, *(f"rjtestv{host}" for host in range(3))}
        assert machine.names == names
        shaped = [c for c in machine.commands if "tbf rate 1gbit" in c]
        assert len(shaped) == 6  # both ends of every link
        added = f"ip -n rjtestn2 addr add {address(2)}/24 dev eth0"
        assert added in machine.commands
    assert machine.names == set()


def test_links_without_a_rate_have_no_token_bucket() -> None:
    assert not any(words[0] == "tc" for words in Namespaces(2, None, "x").up())


@pytest.mark.parametrize(
    "word", ["link add rjtestv1", "netns add rjtestn2", "tc qdisc"]
)
def test_a_failed_setup_removes_its_parts(network: Any, word: str) -> None:
    machine = Machine(fails=word)
    with (
        pytest.raises(RuntimeError, match=f"{word}.*: no such thing"),
        network(machine),
    ):
        pytest.fail("it was not made")
    assert machine.names == set()


def test_an_interrupt_removes_the_network(network: Any) -> None:
    machine = Machine(fails="netns add rjtestn1", raises=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), network(machine):
        pytest.fail("it was not made")
    assert machine.names == set()
    machine = Machine()
    with pytest.raises(KeyboardInterrupt), network(machine):
        raise KeyboardInterrupt
    assert machine.names == set()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restores Ctrl-C, which processes in a shell's background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_the_removal_is_raised_after_it(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    made = network(machine)

    def interrupted(command: list[str]) -> subprocess.CompletedProcess[str]:
        if command == ["ip", "netns", "del", "rjtestn0"]:
            signal.raise_signal(signal.SIGINT)
        return machine(command)

    with pytest.raises(KeyboardInterrupt), made:
        monkeypatch.setattr(namespaces, "_call", interrupted)
    assert machine.names == set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_error_names_parts_that_cannot_be_removed(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "END", 0.05)
    machine = Machine(fails="link del rjbtest")
    made = network(machine)
    with pytest.raises(RuntimeError, match="could not remove rjbtest"), made:
        pass


def test_names_too_long_for_the_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        Namespaces(2, None, "longerthanthat")
    with pytest.raises(ValueError, match="cannot be named"):
        Namespaces(255, None, "x")


# -- tables ----------------------------------------------------------------------------


def test_table_of_shares() -> None:
    layout = Layout(4, 2, "1gbit")
    size = 100 * MIB
    bound = 1.5 * size / 125e6
    results = [
        {
            "kind": "collective",
            "collective": "allreduce",
            "size": size,
            "algorithm": "hierarchical",
            "seconds": bound / 0.8,
            "rounds": [bound / 0.8] * 3,
            "busy": 0.5,
        },
        *(
            {
                "kind": "streams",
                "collective": name,
                "size": size,
                "flows": flows,
                "seconds": bound / share,
                "rounds": [bound / share] * 3,
                "busy": 0.1,
            }
            for name, flows, share in (
                ("allreduce", 1, 0.9),
                ("allreduce", 2, 0.95),
                ("broadcast", 1, 2.0),  # not those of an allreduce
            )
        ),
    ]
    (row,) = collectives.rows_of(results, layout)
    assert row["share_of_bound"] == pytest.approx(0.8)
    assert row["share_of_ring_bound"] == pytest.approx(0.8 * 1.75 / 1.5)
    assert row["share_of_streams"] == pytest.approx(0.8 / 0.95)
    json.dumps(row)
    text = collectives.table(layout, [row])
    assert "4 hosts x 2, 1gbit" in text
    assert "0.800" in text and "hierarchical" in text and "allreduce" in text
    (free,) = collectives.rows_of(results, Layout.parse("loopback"))
    assert free["share_of_bound"] is None
    assert "0.84" in collectives.table(Layout.parse("loopback"), [free])


def test_shares_of_the_model_are_taken_within_rounds() -> None:
    seconds = {
        "none": [1.0, 2.0, 1.0],
        "in turn": [1.5, 2.5, 1.5],
        "overlapped": [1.05, 2.05, 1.0],
        "tuned": [1.0, 2.0, 1.0],
        "alone": [0.4, 0.4, 0.4],
    }
    results = [
        {
            "kind": "model",
            "variant": name,
            "size": 4 * MIB,
            "rounds": rounds,
            "exposed": 0.02 if name == "overlapped" else 0.0,
        }
        for name, rounds in seconds.items()
    ]
    row = collectives.model_row(results, Layout(4, 1, "1gbit"))
    assert row is not None
    assert row["hidden"] == pytest.approx(0.9)
    assert row["hidden_rounds"] == pytest.approx([0.9, 0.9, 1.0])
    assert row["hidden_waiting"] == pytest.approx(0.95)
    text = collectives.model_text(row)
    assert "hidden: 0.90 (0.90 .. 1.00), of the waiting: 0.95 (20.0 ms left)" in text
    assert collectives.model_row([], Layout(4, 1, "1gbit")) is None
