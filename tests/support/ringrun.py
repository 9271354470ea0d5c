"""Runs ringrun to its end, with a stand-in for ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launch import environment

# A stand-in for OpenSSH with the command line of ssh: options, a host, then the words
# of a command for the login shell.
SSH = """#!/bin/sh
echo "$@" >> "$SSH_LOG"
while :; do case "$1" in -p|-i) shift 2;; -*) shift;; *) break;; esac; done
case "$1" in *unreachable*) echo "ssh: no route to $1" >&2; exit 255;; esac
shift
echo "Welcome to this machine"
cd / && exec env -u RINGJAX_SECRET sh -c "$*"
"""
Done = subprocess.CompletedProcess[str]


def ringrun(*words: str | Path, given: str = "", **env: str) -> Done:
    """Runs ringrun to its end; `given` is its standard input."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringjax.run", *map(str, words)],
        env=environment("ringrun", env),
        **({"input": given} if given else {"stdin": subprocess.DEVNULL}),
        capture_output=True,
        text=True,
        timeout=50,
    )


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """Returns variables that make ringrun use the stand-in. SSH_LOG is its log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    log = tmp_path / "ssh.log"
    log.touch()
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SSH_LOG": str(log)}
