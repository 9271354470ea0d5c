"""Part file: the lines of JSON that one process writes for a profile, limited in size.

Two files keep the newest lines: a full file is renamed to NAME.1, and a new file begins
with the header lines of the full file. An error ends the recording, but never the
program. profile/parts.py reads the files.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

_MAX_BYTES = 64 << 20  # both files together; room for about 300,000 calls


class PartFile:
    r"""A part file that is open for writing. Replaces an existing file.

    `on_error` is called once with a text when writing fails, for example because the
    disk is full. `max_bytes` is the largest size of both files together.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank-0.jsonl"
        >>> part = PartFile(path, print)
        >>> part.write_header(who="rank 0")
        >>> part.write_lines(b'{"op": "barrier"}', b"")
        >>> part.close()
        >>> path.read_bytes()
        b'{"who": "rank 0"}\n{"op": "barrier"}\n'
    """

    def __init__(
        self, path: Path, on_error: Callable[[str], None], max_bytes: int = _MAX_BYTES
    ) -> None:
        self.path = path
        self._on_error, self._max_size = on_error, max_bytes // 2
        self._lock = threading.Lock()  # the program's thread writes step marks
        self._header = b""
        self._size = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._older_path().unlink(missing_ok=True)
        self._file: io.FileIO | None = _create(path)

    def write_header(self, **values: object) -> None:
        """Writes a header line, which is repeated at the start of each later file."""
        line = json.dumps(values).encode() + b"\n"
        with self._lock:
            self._header += line
            self._write(line)

    def write_record(self, **values: object) -> None:
        self.write_lines(json.dumps(values).encode())

    def write_lines(self, *lines: bytes) -> None:
        """Writes lines. Appends missing newlines, and skips empty arguments."""
        data = b"".join(
            line if line.endswith(b"\n") else line + b"\n" for line in lines if line
        )
        with self._lock:
            if self._size + len(data) > self._max_size and self._size > len(
                self._header
            ):
                self._rotate()
            self._write(data)

    def close(self) -> None:
        """Closes the file. Later writes and further calls do nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _older_path(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def _rotate(self) -> None:
        try:
            os.replace(self.path, self._older_path())
            self.close()
            self._file = _create(self.path)
        except OSError as error:
            self._stop(error)
        self._size = 0
        self._write(self._header)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._file is not None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._stop(error)
        self._size += len(data)

    def _stop(self, error: OSError) -> None:
        self.close()
        self._on_error(f"{self.path}: {error.strerror or error}")


def _create(path: Path) -> io.FileIO:
    # Use no buffer, because a forked child would write the buffer a second time.
    return io.FileIO(path, "w")
