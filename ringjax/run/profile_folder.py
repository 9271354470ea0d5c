"""`ringrun --profile`: the folder before the job, and what is made of it afterwards.

What ranks write is in world/profile_recording.py; bringing it together is another
process's work (profile/), because ringrun loads nothing of that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from ringjax import stderr
from ringjax.run import environ

_PATIENCE = 300.0  # seconds


def prepare(folder: str) -> str:
    """Makes it; returns its absolute path, for ranks elsewhere.

    Raises:
        OSError: nothing can be written there.
    """
    folder = os.path.abspath(folder)
    os.makedirs(folder, exist_ok=True)
    probe = os.path.join(folder, f".ringrun-{os.getpid()}")
    with open(probe, "wb"):
        os.unlink(probe)
    return folder


def bring_together(folder: str, note: Callable[[str], None]) -> None:
    """Writes the archives, and says what is in them; the job is over in any case."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ringjax.profile", "merge", folder],
            env={**environ.inherited(), "PYTHONPATH": environ.agent_path()},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"--profile: {error}; try `python -m ringjax.profile merge {folder}`")
        return
    stderr.line((done.stdout + done.stderr).rstrip())
