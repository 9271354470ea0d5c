"""Console: shows the output of all ranks with prefixes, and copies the output to files.

On a terminal the prefix of a line is a coloured `[rank]`. In a log the prefix is
Horovod's `[rank]<stdout>:`, so that scripts that parse such logs keep working. Files
contain the bytes that the rank has written, without prefixes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from ringjax.control.polling import wait_writable
from ringjax.run import environ

_COLOURS = (36, 33, 32, 35, 34, 31)
_MAX_PARTIAL = 1 << 16  # most bytes of a line that wait for the end of the line
_BAR_INTERVAL = 10.0  # seconds between two states of a progress bar in a log
# Lines that do not explain why a rank has failed: progress bars, and lines that JAX,
# ringjax and C++ libraries print below an error message.
_NO_REASON = re.compile(
    r"-+$|For simplicity, JAX has removed its internal frames"
    r"|Help: ringjax explain \w+$|\[ringjax\b|@ +0x[0-9a-f]+ |\*\*\* |.*\d%\|"
)
_CRASH = "Fatal Python error: "  # the first words of a crash report of Python
_STREAMS = {"stdout": 1, "stderr": 2}


def padded(rank: int, size: int) -> str:
    """Pads a rank with zeros, as Horovod does, so that names are sorted by rank."""
    return str(rank).zfill(len(str(size - 1)))


class Console:
    """Merges the output of `size` ranks on the output streams of ringrun.

    If a copy cannot be written any more, for example because the disk is full, the
    console prints one line about the copy, and the job and the other copies continue.

    Args:
        directory: if not None, DIR/rank.N/stdout and DIR/rank.N/stderr receive copies.
        timestamps: whether the local time comes before every prefix.
        python: whether to write to sys.stdout and sys.stderr, which a notebook may have
            replaced, and not to the descriptors of the process.
        plain: whether standard output has no prefixes, because only one rank prints.

    Attributes:
        labels: prefixes for the output of clients (ssh), by their negative ids. ranks:
        for an elastic job, the rank of each worker, by worker id.
        on_note: called with each line of `note`.
    """

    def __init__(
        self,
        size: int,
        *,
        directory: str | None = None,
        timestamps: bool = False,
        python: bool = False,
        plain: bool = False,
    ) -> None:
        self._size = size
        self._plain = plain
        self._timestamps = timestamps
        self._python = python
        self._terminal = {1: _is_terminal(sys.stdout), 2: _is_terminal(sys.stderr)}
        self._lost: set[int] = set()  # streams of ringrun that cannot be written
        self.labels: dict[int, str] = {}
        self.on_note: Callable[[str], None] = lambda text: None
        self.ranks: dict[int, int] = {}
        self._colour = environ.wants_colour()
        self._partial: dict[tuple[int, str], bytes] = {}
        # The rank and stream that have written the unfinished last line on the
        # terminal.
        self._unfinished: tuple[int, str] | None = None
        self._last: dict[int, str] = {}  # the last line of error output, by rank
        # When a state of a progress bar was last shown, by rank and stream.
        self._bars: dict[tuple[int, str], float] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._directory = Path(directory) if directory else None
        for rank in range(size):
            self._open(rank, f"rank.{padded(rank, size)}")

    def _open(self, name: int, folder: str) -> None:
        if self._directory is None:
            return
        place = self._directory / folder
        place.mkdir(parents=True, exist_ok=True)
        for stream in _STREAMS:
            # Use no buffer, so that users can follow a log while the job runs.
            self._files[name, stream] = (place / stream).open("wb", buffering=0)

    def add(self, worker: int, rank: int) -> None:
        """Adds the output of a worker of an elastic job, whose rank is `rank`.

        The output of the first `size` workers is copied to rank.N, and the output of
        later workers to worker.N.
        """
        self.ranks[worker] = rank
        if worker >= self._size:
            try:
                self._open(worker, f"worker.{worker}")
            except OSError as error:
                self.note(f"no copy of the output of worker {worker}: {error}")

    def remove(self, worker: int) -> None:
        """Closes the files of a worker that has ended all its output."""
        for stream in _STREAMS:
            self._close(self._files.pop((worker, stream), None))

    def last_error(self, rank: int) -> str:
        """Returns the last line of a rank's error output that may explain a failure."""
        return self._last.get(rank, "")

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Shows the complete lines of a rank's output, and keeps an unfinished line.

        Pass empty `data` at the end of the stream.
        """
        if not data:
            self._finish(rank, stream)
            return
        key = (rank, stream)
        if key in self._files:
            self._copy(key, data)
        data = self._partial.pop(key, b"") + data
        if stream == "stderr":
            self._record_last_error(rank, data)
        if b"\r" in data:
            lines = data.splitlines(keepends=True)  # a carriage return ends a line, too
            rest = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
            pieces = self._drop_bar_states(key, lines)
        else:
            end = data.rfind(b"\n") + 1
            pieces, rest = [data[:end]] if end else [], data[end:]
        if len(rest) > _MAX_PARTIAL:
            pieces.append(rest)
            rest = b""
        if rest:
            self._partial[key] = rest
        if pieces:
            self._show(key, pieces)

    def _drop_bar_states(self, key: tuple[int, str], lines: list[bytes]) -> list[bytes]:
        """Removes most states of progress bars, which end with a carriage return.

        On a terminal or in a notebook only rank 0 shows its bar, because the bars of
        several ranks would overwrite each other. In a log one state in `_BAR_INTERVAL`
        seconds becomes a line.
        """
        rank, stream = key
        moving = self._python or self._terminal[_STREAMS[stream]]
        if moving and self.ranks.get(rank, rank) == 0:
            return lines
        kept = []
        for line in lines:
            if not line.endswith(b"\r"):
                kept.append(line)
            elif not moving and len(line) > 1:
                now = time.monotonic()
                if now - self._bars.setdefault(key, now) >= _BAR_INTERVAL:
                    self._bars[key] = now
                    kept.append(line[:-1] + b"\n")
        return kept

    def _copy(self, key: tuple[int, str], data: bytes) -> None:
        file = self._files[key]
        try:
            _write_all(file.fileno(), data)
        except OSError as error:
            self._close(self._files.pop(key))
            why = f"{error.strerror or error}; the job goes on"
            self.note(f"no more copies in {file.name}: {why}")

    @staticmethod
    def _close(file: BinaryIO | None) -> None:
        if file is not None:
            with contextlib.suppress(OSError):  # a file server may report errors late
                file.close()

    def _record_last_error(self, rank: int, data: bytes) -> None:
        last = self._last.get(rank, "")
        if _CRASH in last:  # only stacks follow, which explain less than that line
            return
        if (at := data.find(_CRASH.encode())) >= 0:
            line = data[data.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
            self._last[rank] = line.decode(errors="replace").strip()
            return
        found = ""
        lines = data.replace(b"\r\n", b"\n").rstrip(b"\n").split(b"\n")
        for line in reversed(lines):
            text = line.decode(errors="replace")
            # This loop reads backwards. An indented line, such as a location in the
            # program, belongs to a line above it. A line with \r is a progress bar.
            if _NO_REASON.match(text.strip()):
                found = ""  # the indented lines below belong to this line: drop them
            if not text.strip() or "\r" in text or _NO_REASON.match(text.strip()):
                continue
            if not text[0].isspace():
                self._last[rank] = text.strip()
                return
            found = found or text.strip()
        if found and not last:
            self._last[rank] = found

    def _finish(self, rank: int, stream: str) -> None:
        """Shows the unfinished last line of a stream that has ended."""
        rest = self._partial.pop((rank, stream), b"")
        if rest or self._unfinished == (rank, stream):
            self._show((rank, stream), [rest + b"\n"])

    def idle(self) -> None:
        """Shows unfinished lines on terminals. Call this while no output arrives."""
        for key, rest in list(self._partial.items()):
            if self._terminal[_STREAMS[key[1]]]:
                del self._partial[key]
                self._show(key, [rest])

    def _prefix(self, rank: int, stream: str) -> bytes:
        time_text = time.asctime() if self._timestamps else ""
        if rank < 0:
            return f"ringrun: {self.labels[rank]}: ".encode()
        rank = self.ranks.get(rank, rank)
        if self._plain and stream == "stdout":
            return f"{time_text} ".lstrip().encode()
        if not self._terminal[_STREAMS[stream]]:
            return f"{time_text}[{rank}]<{stream}>:".encode()
        label = f"[{rank:{len(str(self._size - 1))}d}]"
        if self._colour:
            label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        return f"{time_text} {label} ".lstrip().encode()

    def _show(self, key: tuple[int, str], pieces: list[bytes]) -> None:
        """Writes lines with their rank's prefix. Only the last may be unfinished."""
        target = _STREAMS[key[1]]
        prefix = self._prefix(*key)
        within = b"\n" + prefix
        text = prefix + prefix.join(
            piece[:-1].replace(b"\n", within) + piece[-1:] for piece in pieces
        )
        if self._unfinished == key:
            # `text` continues the unfinished line of this rank on the terminal.
            text = text[len(prefix) :]
        else:
            self._end_line()
        self._unfinished = None if pieces[-1].endswith((b"\n", b"\r")) else key
        self._write(target, text)

    def _end_line(self) -> None:
        if self._unfinished is not None:
            stream = self._unfinished[1]
            self._unfinished = None
            self._write(_STREAMS[stream], b"\n")

    def note(self, text: str) -> None:
        """Writes a message of ringrun to standard error, as one line."""
        self.write_lines(f"ringrun: {text}")
        self.on_note(text)

    def write_lines(self, text: str) -> None:
        """Writes text of ringrun to standard error, without a prefix."""
        self._end_line()
        self._write(2, f"{text}\n".encode(errors="replace"))

    def close(self) -> None:
        """Shows all unfinished lines and closes the files."""
        for rank, stream in list(self._partial):
            self._finish(rank, stream)
        self._end_line()
        for file in self._files.values():
            self._close(file)
        self._files.clear()

    def _write(self, target: int, data: bytes) -> None:
        """Writes `data` to standard output (1) or standard error (2).

        After the first error, prints one line about the error on the other stream.
        """
        if target in self._lost:
            return
        try:
            if self._python:
                file = sys.stdout if target == 1 else sys.stderr
                if file is not None:  # a stream that was closed at the start is None
                    name = getattr(file, "encoding", None) or "utf-8"
                    text = data.decode(errors="replace")
                    # Write "?" for a character that the encoding of the stream does not
                    # contain.
                    file.write(text.encode(name, "replace").decode(name))
                    file.flush()
            else:
                _write_all(target, data)
        except (OSError, ValueError) as error:  # closed streams raise ValueError
            self._lost.add(target)
            name = "standard output" if target == 1 else "standard error"
            why = f"{getattr(error, 'strerror', None) or error}; the job goes on"
            text = f"ringrun: nothing more is written to {name}: {why}\n"
            self._write(3 - target, text.encode())


def pipe_standard_input(source: int = 0) -> int:
    r"""Returns a pipe from which rank 0 reads the input that arrives at `source`.

    Ranks are in background process groups, so that only ringrun gets Ctrl-C. Background
    processes cannot read from the terminal, so a thread of ringrun copies the input.

    Example:
        >>> source, keys = os.pipe()
        >>> rank = pipe_standard_input(source)
        >>> os.write(keys, b"continue\n")
        9
        >>> os.read(rank, 99)
        b'continue\n'
        >>> os.close(keys)
        >>> os.read(rank, 99)
        b''
    """
    reader, writer = os.pipe()

    def pass_on() -> None:
        # The rank may end, or may close its input, before it has read all the data.
        with open(writer, "wb", buffering=0) as pipe, contextlib.suppress(OSError):
            while piece := os.read(source, 1 << 16):
                pipe.write(piece)

    # A daemon thread, because a read of the terminal may never return.
    threading.Thread(target=pass_on, name="ringrun-keyboard", daemon=True).start()
    return reader


def _is_terminal(stream: TextIO | None) -> bool:
    # A stream is None if it was closed before the start. A stream that was closed later
    # raises ValueError.
    with contextlib.suppress(ValueError):
        return stream is not None and stream.isatty()
    return False


def _write_all(target: int, data: bytes) -> None:
    """Writes all data to a descriptor, even if the descriptor is non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            wait_writable(target)
