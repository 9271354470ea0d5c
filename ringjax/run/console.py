"""What the user sees: lines of all ranks with a prefix, and a copy of each in files.

On a terminal the prefix is a coloured `[rank]`; elsewhere it is Horovod's
`[rank]<stdout>:`, so that scripts that read such logs keep working. Files hold the
bytes that the rank wrote, without prefixes. Knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from ringjax.control.polling import wait_writable
from ringjax.run import environ

_COLOURS = (36, 33, 32, 35, 34, 31)
_MAX_PARTIAL = 1 << 16  # bytes of an unfinished line that are kept waiting
_BAR_INTERVAL = 10.0  # seconds from one state of a progress bar to the next, in logs
_END = re.compile(rb"\r\n|\n|\r")
# Lines that are no reason why a rank has failed: those that JAX, ringjax and C++
# libraries print below the message of an error, and progress bars.
_NO_REASON = re.compile(
    r"-+$|For simplicity, JAX has removed its internal frames"
    r"|Help: ringjax explain \w+$|\[ringjax\b|@ +0x[0-9a-f]+ |\*\*\* |.*\d%\|"
)
_CRASH = "Fatal Python error: "  # of faulthandler, and of the interpreter itself
_STREAMS = {"stdout": 1, "stderr": 2}


def padded(rank: int, size: int) -> str:
    """The rank with the zeros that make directory names sort (Horovod's width)."""
    return str(rank).zfill(len(str(size - 1)))


class Console:
    """Merges the output of `size` ranks on our own standard output and error.

    A copy that cannot be written any more (the disk is full, nobody reads) is given up,
    which is said once; the job and the other copies go on.

    Args:
        size: number of ranks.
        directory: if given, DIR/rank.N/stdout and stderr get a copy.
        timestamps: put the local time before every prefix.
        python: write to sys.stdout and sys.stderr, which a notebook may have replaced,
            and not to the descriptors of the process.
        plain: on standard output one rank speaks for all: no prefixes there.
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
        self._lost: set[int] = set()  # targets that cannot be written any more
        self.labels: dict[int, str] = {}  # of ssh clients, whose ids are negative
        self.on_note: Callable[[str], None] = lambda text: None  # hears them, too
        self.ranks: dict[int, int] = {}  # of workers of an elastic job, by their number
        self._colour = environ.wants_colour()
        self._partial: dict[tuple[int, str], bytes] = {}
        self._unfinished: tuple[int, str] | None = None  # whose line the cursor is in
        self._last: dict[int, str] = {}
        self._bars: dict[tuple[int, str], float] = {}  # when a state was shown
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
            # Unbuffered, so that a log can be followed while the job runs.
            self._files[name, stream] = (place / stream).open("wb", buffering=0)

    def add(self, worker: int, rank: int) -> None:
        """A worker of an elastic job starts in the place of `rank`.

        The first `size` of them write to rank.N, later ones to worker.N.
        """
        self.ranks[worker] = rank
        if worker >= self._size:
            try:
                self._open(worker, f"worker.{worker}")
            except OSError as error:
                self.note(f"no copy of the output of worker {worker}: {error}")

    def remove(self, worker: int) -> None:
        """Its output has ended: closes its files."""
        for stream in _STREAMS:
            self._close(self._files.pop((worker, stream), None))

    @property
    def waiting(self) -> bool:
        """Whether `idle` would show an unfinished line."""
        return any(
            data and self._terminal[_STREAMS[stream]]
            for (_, stream), data in self._partial.items()
        )

    def last_error(self, rank: int) -> str:
        """The last line, not empty, that the rank wrote to its standard error."""
        return self._last.get(rank, "")

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Take output of a rank; whole lines appear, the rest waits for its end."""
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
            lines, rest = _split_lines(data)
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
        """Without the states of progress bars that are overwritten by the next one.

        On a terminal or in a notebook, rank 0's are shown as they are; those of several
        ranks would overwrite each other. Elsewhere a state becomes a line now and then.
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
            with contextlib.suppress(OSError):  # what a file server tells only now
                file.close()

    def _record_last_error(self, rank: int, data: bytes) -> None:
        last = self._last.get(rank, "")
        if _CRASH in last:  # stacks of all threads follow it
            return
        if (at := data.find(_CRASH.encode())) >= 0:
            line = data[data.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
            self._last[rank] = line.decode(errors="replace").strip()
            return
        found = ""
        for line in _reversed_lines(data.replace(b"\r\n", b"\n").rstrip(b"\n")):
            text = line.decode(errors="replace")
            # A line with \r is a progress bar. What is indented belongs to a line
            # above, such as the place in a program that a note names.
            if _NO_REASON.match(text.strip()):
                found = ""  # what is indented below belongs to the note
            if not text.strip() or "\r" in text or _NO_REASON.match(text.strip()):
                continue
            if not text[0].isspace():
                self._last[rank] = text.strip()
                return
            found = found or text.strip()
        if found and not last:
            self._last[rank] = found

    def _finish(self, rank: int, stream: str) -> None:
        """The stream has ended: a last line without an end gets one."""
        rest = self._partial.pop((rank, stream), b"")
        if rest or self._unfinished == (rank, stream):
            self._show((rank, stream), [rest + b"\n"])

    def idle(self) -> None:
        """Nothing came for a moment: show unfinished lines on terminals."""
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
        """Write whole lines with prefixes; only the last one may be unfinished."""
        target = _STREAMS[key[1]]
        prefix = self._prefix(*key)
        within = b"\n" + prefix
        text = prefix + prefix.join(
            piece[:-1].replace(b"\n", within) + piece[-1:] for piece in pieces
        )
        if self._unfinished == key:
            text = text[len(prefix) :]  # we are in the middle of this rank's line
        else:
            self._end_line()
        self._unfinished = None if pieces[-1].endswith((b"\n", b"\r")) else key
        self._write(target, text)

    def _end_line(self) -> None:
        """End the unfinished line of whoever has it."""
        if self._unfinished is not None:
            stream = self._unfinished[1]
            self._unfinished = None
            self._write(_STREAMS[stream], b"\n")

    def note(self, text: str) -> None:
        """A line of ringrun's own, on standard error."""
        self.write_lines(f"ringrun: {text}")
        self.on_note(text)

    def write_lines(self, text: str) -> None:
        """Lines as they are, on standard error."""
        self._end_line()
        self._write(2, f"{text}\n".encode(errors="replace"))

    def close(self) -> None:
        """Show every unfinished line and close the files."""
        for rank, stream in list(self._partial):
            self._finish(rank, stream)
        self._end_line()
        for file in self._files.values():
            self._close(file)
        self._files.clear()

    def _write(self, target: int, data: bytes) -> None:
        """Writes everything; says once, on the other one, that it is not possible."""
        if target in self._lost:
            return
        try:
            if self._python:
                file = sys.stdout if target == 1 else sys.stderr
                if file is not None:  # closed when the program was started
                    name = getattr(file, "encoding", None) or "utf-8"
                    text = data.decode(errors="replace")
                    # A character that the stream cannot show becomes a "?".
                    file.write(text.encode(name, "replace").decode(name))
                    file.flush()
            else:
                _write_all(target, data)
        except (OSError, ValueError) as error:  # the latter: it was closed since
            self._lost.add(target)
            name = "standard output" if target == 1 else "standard error"
            why = f"{getattr(error, 'strerror', None) or error}; the job goes on"
            text = f"ringrun: nothing more is written to {name}: {why}\n"
            self._write(3 - target, text.encode())


def pipe_standard_input(source: int = 0) -> int:
    r"""Returns a pipe from which rank 0 reads what comes from `source`.

    Ranks are in process groups of their own, which may not read from the terminal, and
    only ringrun may get the signals of its keys. So ringrun reads and passes the bytes
    on, in a thread.

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
        # The rank may end, or close its input, before it has read everything.
        with open(writer, "wb", buffering=0) as pipe, contextlib.suppress(OSError):
            while piece := os.read(source, 1 << 16):
                pipe.write(piece)

    # A daemon, because it may wait for a key for ever.
    threading.Thread(target=pass_on, name="ringrun-keyboard", daemon=True).start()
    return reader


def _split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Lines with their ends, which may be a lone return, and what follows them."""
    ends = [found.end() for found in _END.finditer(data)]
    starts = [0, *ends]
    lines = [data[a:b] for a, b in zip(starts, ends, strict=False)]
    return lines, data[starts[-1] :]


def _reversed_lines(data: bytes) -> Iterator[bytes]:
    """The lines of `data` without their ends, the last one first."""
    end = len(data)
    while end >= 0:
        start = data.rfind(b"\n", 0, end) + 1
        yield data[start:end]
        end = start - 1


def _is_terminal(stream: TextIO | None) -> bool:
    """Not if it was closed, at the start (None) or since."""
    with contextlib.suppress(ValueError):
        return stream is not None and stream.isatty()
    return False


def _write_all(target: int, data: bytes) -> None:
    """Write to a descriptor, also to one that somebody made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            wait_writable(target)
