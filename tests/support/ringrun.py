"""Running ringrun to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.launch import environment

Done = subprocess.CompletedProcess[str]


def ringrun(*words: str | Path, **env: str) -> Done:
    """Runs ringrun to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringjax.run", *map(str, words)],
        env=environment("ringrun", env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]
