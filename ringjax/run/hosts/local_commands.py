"""Short commands on this machine whose output ringrun needs (discovery scripts)."""

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
    """The output and the exit codes of running commands, by process number."""

    def __init__(self) -> None:
        self._running: dict[int, _Command] = {}

    def numbers(self) -> set[int]:
        return set(self._running)

    def add(self, number: int, done: Callable[[int, str, str], None]) -> None:
        """Registers a command; `done` gets its exit code, output and error output."""
        self._running[number] = _Command(done)

    def add_output(self, number: int, stream: str, data: bytes) -> bool:
        """Adds output if the process is a command; returns whether it is.

        Empty `data` means that the stream has ended.
        """
        command = self._running.get(number)
        if command is not None:
            command.output.setdefault(stream, bytearray()).extend(data)
            if not data:
                command.open.discard(stream)
                self._settle(number, command)
        return command is not None

    def record_exit(self, number: int, code: int, text: str) -> bool:
        """Records an exit if the process is a command; returns whether it is."""
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
        """Calls `done` if the process has ended and both streams are closed.

        The agent reports the exit when it collects the process, and the last output may
        still be in the pipes.
        """
        if command.code is None or command.open:
            return
        del self._running[number]
        out, err = (
            bytes(command.output.get(stream, b"")).decode(errors="replace")
            for stream in ("stdout", "stderr")
        )
        command.done(command.code, out, err or command.text)
