"""A key-value store in a folder, with the methods of JAX's client of its store."""

from __future__ import annotations

import time
from pathlib import Path


class FolderStore:
    """A store of one file for each key, which all processes of a test share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "+")

    def key_value_set(self, key: str, value: str) -> None:
        path = self._path(key)
        if path.exists():
            raise RuntimeError(f"ALREADY_EXISTS: {key}")
        new = path.with_suffix(".new")
        new.write_text(value)
        new.rename(path)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        deadline = time.monotonic() + timeout_in_ms / 1000
        while not self._path(key).exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            time.sleep(0.005)  # no event reports a file of another process
        return self._path(key).read_text()
