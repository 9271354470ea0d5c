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
    """Collects the output and the exit codes of running commands, by process number."""

    def __init__(self) -> None:
        self._running: dict[int, _Command] = {}

    def numbers(self) -> set[int]:
        return set(self._running)

    def add(self, number: int, done: Callable[[int, str, str], None]) -> None:
        """Registers a command.

        Args:
            number: number of the command's process.
            done: called with exit code, output and error output when the command has
                ended.
        """
        self._running[number] = _Command(done)

    def add_output(self, number: int, stream: str, data: bytes) -> bool:
        """Adds output if the process is a command. Empty `data` ends the stream.

        Returns:
            Whether the process is a command.
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
            if text:  # the command never ran, so its streams will not report an end
                command.open.clear()
            self._settle(number, command)
        return command is not None

    def fail_all(self, text: str) -> None:
        for number in self.numbers():
            self.record_exit(number, 255, text)

    def _settle(self, number: int, command: _Command) -> None:
        """Calls `done` once the process has ended and both streams are closed.

        The exit and the ends of the streams may arrive in any order: the agent reports
        the exit as soon as it has collected the process, and the rest of the output may
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
