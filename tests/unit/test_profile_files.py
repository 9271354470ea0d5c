"""Tests of the transfer of profile files to ringrun, and of where they are written."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ringjax.run.hosts.profile_files import FileReceiver, prepare_folder, read_files


class Agent:
    """An agent that sends the files of a folder at once."""

    def __init__(
        self, folder: Path, since: float = 0.0, *, silent: bool = False
    ) -> None:
        self.folder, self.since, self.silent = folder, since, silent
        self.closed = False
        self.waiting: list[dict[str, Any]] = []

    def send(self, request: dict[str, Any]) -> None:
        here = {**request, "folder": str(self.folder)}
        self.waiting += [] if self.silent else read_files(here, self.since)


def fetch(folder: Path, *agents: Agent) -> list[str]:
    """Fetches the files of all agents. Returns the lines that were shown."""
    incoming, notes = FileReceiver(str(folder)), list[str]()

    def turn(seconds: float) -> None:
        assert seconds > 0
        for agent in agents:
            agent.closed = agent.silent  # a silent agent has ended
            if agent.waiting:
                incoming.receive(agent.waiting.pop(0))

    incoming.fetch(agents, turn, notes.append)  # type: ignore[arg-type]
    return notes


def test_only_missing_files_are_fetched(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "parts" / "x.jax").mkdir(parents=True)
    here.mkdir()
    large = os.urandom(700_000)
    (there / "parts" / "x.jsonl").write_bytes(large)
    (there / "parts" / "x.jax" / "t.json.gz").write_bytes(b"trace")
    (there / "both").write_bytes(b"theirs")
    (here / "both").write_bytes(b"ours")
    assert fetch(here, Agent(there)) == []
    assert (here / "parts" / "x.jsonl").read_bytes() == large
    assert (here / "parts" / "x.jax" / "t.json.gz").read_bytes() == b"trace"
    assert (here / "both").read_bytes() == b"ours"


def test_files_older_than_the_job_are_not_fetched(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    here.mkdir()
    (there / "old").write_text("old")
    os.utime(there / "old", (1, 1))
    (there / "new").write_text("new")
    assert fetch(here, Agent(there, time.time() - 60)) == []
    assert [path.name for path in here.iterdir()] == ["new"]


def test_a_silent_agent_does_not_block_the_fetch(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "new").write_text("new")
    assert fetch(tmp_path, Agent(there, silent=True)) == []


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "link"])
def test_files_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "out")
    data = base64.b64encode(b"x").decode()
    incoming = FileReceiver(str(folder))
    incoming.receive({"is": "file", "name": name, "data": data})
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]
    assert [path.name for path in folder.iterdir()] == ["link"]


def test_prepare_folder_creates_the_folder_and_tests_writing(tmp_path: Path) -> None:
    made = prepare_folder(str(tmp_path / "a" / "b"))
    assert made == str(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        prepare_folder(str(tmp_path / "file"))
    with pytest.raises(OSError, match="proc"):
        prepare_folder("/proc/none")
