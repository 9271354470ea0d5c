"""Files of `ringrun --profile`: prepares the folder, fetches and merges the files.

Each rank writes into the folder on its own host (world/profile_recording.py). At the
end of the job ringrun requests from each agent the files that are missing on this
machine; none are missing if the hosts share the folder. A separate process merges the
files with ringjax.profile, because ringrun must start quickly and does not import that
package.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ringjax import stderr
from ringjax.run import environ
from ringjax.run.hosts.channel import Message

if TYPE_CHECKING:
    from ringjax.run.hosts.agent_handle import AgentHandle

_CHUNK = 1 << 18
_FETCH_TIMEOUT = 60.0  # seconds to wait for the files of all agents
_MERGE_TIMEOUT = 300.0  # seconds to wait for the process that merges


def prepare_folder(folder: str) -> str:
    """Makes the folder of a profile. Returns its absolute path for all hosts.

    Raises OSError if files cannot be written into the folder.
    """
    folder = os.path.abspath(folder)
    os.makedirs(folder, exist_ok=True)
    probe = os.path.join(folder, f".ringrun-{os.getpid()}")
    with open(probe, "wb"):
        os.unlink(probe)
    return folder


def read_files(request: Message, since: float) -> Iterator[Message]:
    """Yields the messages by which an agent replies to a `FileReceiver`.

    Ignores files older than `since`, in seconds since 1970: they belong to another job.
    """
    folder = Path(request["folder"])
    have = set(request["have"])
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        with contextlib.suppress(OSError):
            if name in have or not path.is_file() or path.stat().st_mtime < since:
                continue
            with path.open("rb") as file:
                while piece := file.read(_CHUNK):
                    data = base64.b64encode(piece).decode()
                    yield {"is": "file", "name": name, "data": data}
    yield {"is": "files"}


class FileReceiver:
    """Receives files from agents, and writes them into a folder on this machine."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._answered = 0
        self._problem = ""

    def fetch(
        self,
        agents: Sequence[AgentHandle],
        poll: Callable[[float], object],
        note: Callable[[str], None],
    ) -> None:
        """Requests the files that are missing on this machine, and waits for them.

        Calls `poll` repeatedly, which waits some seconds for messages and passes them
        to `receive`. `note` prints a line about files that could not be fetched or
        written.
        """
        have = [path for path in self._folder.rglob("*") if path.is_file()]
        names = [path.relative_to(self._folder).as_posix() for path in have]
        request = {"do": "fetch", "folder": str(self._folder), "have": names}
        asked = [agent for agent in agents if not agent.closed]
        for agent in asked:
            agent.send(request)
        deadline = time.monotonic() + _FETCH_TIMEOUT
        while self._answered < sum(not agent.closed for agent in asked):
            if time.monotonic() > deadline:
                note(f"{self._folder}: some hosts have not sent all files")
                return
            poll(0.05)
        if self._problem:
            note(self._problem)

    def receive(self, message: Message) -> None:
        """Writes a piece of a file, or counts the agents that have sent all files."""
        if message["is"] == "files":
            self._answered += 1
            return
        name = PurePosixPath(message["name"])
        # Refuse paths that lead out of the folder, because a host may be compromised.
        if name.is_absolute() or ".." in name.parts or self._problem:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Use O_NOFOLLOW, because another user may have put a symbolic link into the
            # folder.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o666), "ab") as file:
                file.write(base64.b64decode(message["data"]))
        except OSError as error:
            self._problem = f"{path}: {error.strerror}"


def merge_profiles(folder: str, note: Callable[[str], None]) -> None:
    """Merges the files of all ranks after the job, and prints a summary.

    If this fails, `note` prints a line, and the outcome of the job does not change.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ringjax.profile", "merge", folder],
            env={**environ.inherited(), "PYTHONPATH": environ.agent_path()},
            capture_output=True,
            text=True,
            timeout=_MERGE_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"--profile: {error}; try `python -m ringjax.profile merge {folder}`")
        return
    stderr.line((done.stdout + done.stderr).rstrip())
