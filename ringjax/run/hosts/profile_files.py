"""Files that ranks leave in a folder on their host, brought to ringrun at the end.

Of a folder that the hosts share nothing is sent: ringrun says what it has. Both ends
are here; the messages go over the agents' channels.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from ringjax.run.hosts.channel import Message

_CHUNK = 1 << 18
_PATIENCE = 60.0  # seconds


def outgoing(request: Message, since: float) -> Iterator[Message]:
    """What an agent answers to the request of an `FileReceiver`.

    Args:
        since: seconds since 1970; what is older is of another job.
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


class Sender(Protocol):
    """An agent, as far as it matters here."""

    @property
    def done(self) -> bool:
        """Whether nothing will come from it any more."""


AgentT = TypeVar("AgentT", bound=Sender)


class FileReceiver:
    """What comes into a folder here."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._answered = 0
        self._problem = ""

    def fetch(
        self,
        agents: Sequence[AgentT],
        tell: Callable[[AgentT, Message], None],
        turn: Callable[[float], object],
        note: Callable[[str], None],
    ) -> None:
        """Asks them for what is not here, and waits, not for ever.

        Args:
            tell: sends a message to one.
            turn: waits so many seconds for messages, which come to `take`.
            note: told what could not be written.
        """
        have = [path for path in self._folder.rglob("*") if path.is_file()]
        names = [path.relative_to(self._folder).as_posix() for path in have]
        request = {"do": "fetch", "folder": str(self._folder), "have": names}
        asked = [agent for agent in agents if not agent.done]
        for agent in asked:
            tell(agent, request)
        deadline = time.monotonic() + _PATIENCE
        while self._answered < sum(not agent.done for agent in asked):
            if time.monotonic() > deadline:
                note(f"{self._folder}: some hosts have not sent all files")
                return
            turn(0.05)
        if self._problem:
            note(self._problem)

    def take(self, message: Message) -> None:
        """A piece of a file, or the end of what an agent has."""
        if message["is"] == "files":
            self._answered += 1
            return
        name = PurePosixPath(message["name"])
        if name.is_absolute() or ".." in name.parts or self._problem:
            return  # nothing is written elsewhere
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link that somebody has put there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o666), "ab") as file:
                file.write(base64.b64decode(message["data"]))
        except OSError as error:
            self._problem = f"{path}: {error.strerror}"
