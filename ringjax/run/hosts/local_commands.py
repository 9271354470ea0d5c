"""Short commands that ringrun runs on this machine, such as discovery scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Command:
    done: Callable[[int, str, str], None]
    code: int | None = None
    text: str = ""
    output: dict[str, bytearray] = field(default_factory=dict)
    open: set[str] = field(default_factory=lambda: {"stdout", "stderr"})


class LocalCommands:
    """Collects output and exit codes of running commands, by process id in ringrun."""

    def __init__(self) -> None:
        self._running: dict[int, _Command] = {}

    def numbers(self) -> set[int]:
        return set(self._running)

    def add(self, number: int, done: Callable[[int, str, str], None]) -> None:
        """Registers a command. `done` will be called with exit code and outputs."""
        self._running[number] = _Command(done)

    def add_output(self, number: int, stream: str, data: bytes) -> bool:
        """Adds output of a process. Returns False if the process is no such command.

        Empty `data` marks the end of the stream.
        """
        command = self._running.get(number)
        if command is not None:
            command.output.setdefault(stream, bytearray()).extend(data)
            if not data:
                command.open.discard(stream)
                self._settle(number, command)
        return command is not None

    def record_exit(self, number: int, code: int, text: str) -> bool:
        """Records an exit. Returns False if the process is no registered command."""
        command = self._running.get(number)
        if command is not None:
            command.code, command.text = code, text
            if text:  # the command never ran, so no message reports the end of a stream
                command.open.clear()
            self._settle(number, command)
        return command is not None

    def fail_all(self, text: str) -> None:
        for number in self.numbers():
            self.record_exit(number, 255, text)

    def _settle(self, number: int, command: _Command) -> None:
        """Calls `done` if the process has ended and both its streams are closed.

        The agent may report the exit while the last output is still in the pipes.
        """
        if command.code is None or command.open:
            return
        del self._running[number]
        out, err = (
            bytes(command.output.get(stream, b"")).decode(errors="replace")
            for stream in ("stdout", "stderr")
        )
        command.done(command.code, out, err or command.text)
