"""Commands on this machine whose output somebody waits for: a discovery script."""

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
    """Those under way, by the names of their processes."""

    def __init__(self) -> None:
        self._under_way: dict[int, _Command] = {}

    def names(self) -> set[int]:
        """Of their processes."""
        return set(self._under_way)

    def add(self, name: int, done: Callable[[int, str, str], None]) -> None:
        """One has been ordered; `done` gets exit code, output and error output."""
        self._under_way[name] = _Command(done)

    def wrote(self, name: int, stream: str, data: bytes) -> bool:
        """One may have written something; no data: the stream has ended.

        Returns:
            Whether it is one.
        """
        errand = self._under_way.get(name)
        if errand is not None:
            errand.output.setdefault(stream, bytearray()).extend(data)
            if not data:
                errand.open.discard(stream)
                self._settle(name, errand)
        return errand is not None

    def exited(self, name: int, code: int, text: str) -> bool:
        """One may have ended; returns whether it is one."""
        errand = self._under_way.get(name)
        if errand is not None:
            errand.code, errand.text = code, text
            if text:  # it never ran, so nothing closes its streams
                errand.open.clear()
            self._settle(name, errand)
        return errand is not None

    def fail(self, text: str) -> None:
        """All are gone."""
        for name in self.names():
            self.exited(name, 255, text)

    def _settle(self, name: int, errand: _Command) -> None:
        """It may be done: it has ended, and so has what it wrote."""
        if errand.code is None or errand.open:
            return
        del self._under_way[name]
        texts = (
            bytes(errand.output.get(stream, b"")).decode(errors="replace")
            for stream in ("stdout", "stderr")
        )
        out, err = texts
        errand.done(errand.code, out, err or errand.text)
