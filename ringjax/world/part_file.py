"""The part of a profile that one process writes: lines of JSON, bounded, never fatal.

The newest lines are kept, in two files of which the older one has ".1" behind its name.
Each begins with the same lines, which say whose it is. Readers are in profile/parts.py.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of both files; about 300,000 calls


class PartFile:
    r"""Open from the start: what is wrong with the folder is said at once.

    Args:
        path: replaced.
        failed: told once why nothing is written any more, such as a full disk.
        most_bytes: of both files.

    Raises:
        OSError: the file cannot be made.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank-0.jsonl"
        >>> part = PartFile(path, print)
        >>> part.head(who="rank 0")
        >>> part.write(b'{"op": "barrier"}', b"")
        >>> part.close()
        >>> path.read_bytes()
        b'{"who": "rank 0"}\n{"op": "barrier"}\n'
    """

    def __init__(
        self, path: Path, failed: Callable[[str], None], most_bytes: int = MOST_BYTES
    ) -> None:
        self.path = path
        self._failed, self._most = failed, most_bytes // 2
        self._lock = threading.Lock()  # the program's thread marks steps
        self._head = b""
        self._size = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._older().unlink(missing_ok=True)
        # Without a buffer: a forked child has none to write a second time.
        self._file: Any = open(path, "wb", buffering=0)  # noqa: SIM115

    def head(self, **values: Any) -> None:
        """A line that each file begins with."""
        line = json.dumps(values).encode() + b"\n"
        with self._lock:
            self._head += line
            self._put(line)

    def say(self, **values: Any) -> None:
        """A line."""
        self.write(json.dumps(values).encode())

    def write(self, *lines: bytes) -> None:
        """Whole lines; one without its end gets it, an empty one is left out."""
        data = b"".join(
            line if line.endswith(b"\n") else line + b"\n" for line in lines if line
        )
        with self._lock:
            if self._size + len(data) > self._most and self._size > len(self._head):
                self._begin_next()
            self._put(data)

    def close(self) -> None:
        """Nothing is written any more. May be called twice."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _older(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def _begin_next(self) -> None:
        try:
            os.replace(self.path, self._older())
            self.close()
            self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            self._give_up(error)
        self._size = 0
        self._put(self._head)

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._file is not None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._give_up(error)
        self._size += len(data)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._failed(f"{self.path}: {error.strerror or error}")
