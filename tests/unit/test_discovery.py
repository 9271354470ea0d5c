"""Tests of the discovery script of an elastic job, which ringrun runs repeatedly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ringjax.run.hosts.discovery import LIMIT, PERIOD, ScriptDiscovery
from ringjax.run.hosts.slots import HostSlots, parse_discovered


class Shell:
    """A fake shell that records commands. The test calls `done` to end a command."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.signals: list[tuple[int, list[int]]] = []
        self.done: list[Callable[[int, str, str], None]] = []

    def run_command(
        self, argv: Sequence[str], done: Callable[[int, str, str], None]
    ) -> int:
        self.words.append(list(argv))
        self.done.append(done)
        return -len(self.words)

    def signal(self, number: int, names: Sequence[int] | None = None) -> None:
        self.signals.append((number, list(names or ())))


@pytest.fixture
def shell() -> Shell:
    return Shell()


def test_lines_of_the_script() -> None:
    assert parse_discovered(" a:4 \n\n10.0.0.1\nb\na:1\n[::1]:2\n[fe80::2]\n", 3) == [
        HostSlots("a", 5),
        HostSlots("10.0.0.1", 3),
        HostSlots("b", 3),
        HostSlots("::1", 2),
        HostSlots("fe80::2", 3),
    ]
    assert parse_discovered("", 3) == []
    for text in ("a:two", "a b", "-oProxyCommand=x", "a:0"):
        with pytest.raises(ValueError, match="^--host-discovery-script: "):
            parse_discovered(text, 1)


def test_the_script_runs_every_second(shell: Shell) -> None:
    discovery = ScriptDiscovery("./find --all", 2, shell, pytest.fail)
    discovery.tick(10.0)
    discovery.tick(15.0)
    assert shell.words == [["sh", "-c", "./find --all"]]
    assert discovery.hosts is None
    shell.done[0](0, "a\nb:1\n", "")
    assert discovery.hosts == [HostSlots("a", 2), HostSlots("b", 1)]
    discovery.tick(15.0 + PERIOD - 0.01)
    assert len(shell.words) == 1
    discovery.tick(15.0 + PERIOD)
    assert len(shell.words) == 2
    shell.done[1](0, "", "")
    assert discovery.hosts == []


def test_a_script_file_needs_no_shell(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "find hosts"
    file.touch()
    ScriptDiscovery(str(file), 1, shell, pytest.fail).tick(0.0)
    assert shell.words == [[str(file)]]


def test_bad_output_keeps_the_known_hosts(shell: Shell) -> None:
    said: list[str] = []
    discovery = ScriptDiscovery("find", 1, shell, said.append)
    answers = [
        (0, "a:3\n", ""),
        (7, "b:1\n", "warning\nno cluster\n"),
        (0, "b:x\n", ""),
        (0, "a:3\n", ""),
        (0, "a:x\n", ""),
    ]
    for number, answer in enumerate(answers):
        discovery.tick(10.0 * number)
        shell.done[-1](*answer)
        assert discovery.hosts == [HostSlots("a", 3)]
    assert not discovery.unusable
    first, second = said  # one line per period of failures
    assert first == (
        "--host-discovery-script find: exit code 7: no cluster; "
        "the hosts stay as they were"
    )
    assert "slots of 'a' must be a positive whole number, not 'x'" in second


def test_an_unexecutable_script_is_unusable(shell: Shell) -> None:
    discovery = ScriptDiscovery("find", 1, shell, pytest.fail)
    discovery.tick(0.0)
    shell.done[0](127, "", "sh: 1: find: not found\n")
    assert discovery.unusable
    assert discovery.problem == "exit code 127: sh: 1: find: not found"


def test_a_hanging_script_is_killed(shell: Shell) -> None:
    said: list[str] = []
    discovery = ScriptDiscovery("find", 1, shell, said.append)
    discovery.tick(0.0)
    discovery.tick(LIMIT)
    discovery.tick(LIMIT + 0.5)
    assert shell.signals == [(signal.SIGKILL, [-1])]
    # A child of the script may keep its output open. The next run does not wait for it.
    discovery.tick(LIMIT + PERIOD)
    assert said == [f"--host-discovery-script find: it took longer than {LIMIT:g} s"]
    discovery.tick(LIMIT + 2 * PERIOD)
    assert len(shell.words) == 2
    shell.done[0](0, "late:1\n", "")
    assert discovery.hosts is None
    shell.done[1](0, "a\n", "")
    assert discovery.hosts == [HostSlots("a", 1)]
