"""Runs a command whose standard output is a pipe without a reader."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from support.launch import environment


def run_without_reader(words: Sequence[str]) -> tuple[int, str]:
    """Runs a command. Returns its exit code and its standard error."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as nobody:
        done = subprocess.run(
            words,
            env=environment("unread", {}),
            stdin=subprocess.DEVNULL,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
        )
    return done.returncode, done.stderr
