"""Runs a script on the stubs of CUDA and NCCL, with a process for each rank.

The script uses tests/cuda_stub/calls.py and not ringjax. `stub_job` starts a job of
ringjax on the stubs, which is a job of `start_job` with the variables of stubs.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from support.launch import Job, StartJob
from support.stubs import SOURCES, stub_environment

SECONDS = 30.0


def stub_job(
    head: str,
    start: StartJob,
    np: int,
    script: str,
    env: dict[str, str] | None = None,
    **settings: str | float,
) -> Job:
    """Starts a job of ringjax on the stubs, whose script begins with `head`."""
    text = head + textwrap.dedent(script)
    return start(np, text, env=stub_environment(**settings) | (env or {}))


class Processes:
    """Processes that run one script. The `with` statement kills them at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def run(
        self,
        *script: str,
        size: int = 1,
        codes: Sequence[int] = (),
        each: Sequence[dict[str, str]] = (),
        **settings: str | float,
    ) -> None:
        """Runs a script in `size` processes and checks their exit codes.

        Args:
          *script: parts of the script, each dedented by itself.
          size: number of ranks.
          codes: the expected exit code of each rank, by default 0.
          each: additional variables for each rank.
          **settings: settings of the stubs for all ranks.
        """
        text = ["from calls import *", *map(textwrap.dedent, script)]
        file = self.folder / "script.py"
        file.write_text("\n".join(text))
        common = os.environ | stub_environment(**settings)
        for rank in range(size):
            own = {
                "PYTHONPATH": str(SOURCES),
                "STUB_FOLDER": str(self.folder),
                "STUB_RANK": str(rank),
                "STUB_SIZE": str(size),
                **(each[rank] if each else {}),
            }
            with self._text(rank).open("w") as out:
                command = [sys.executable, str(file)]
                self._running.append(
                    subprocess.Popen(command, env=common | own, stdout=out, stderr=out)
                )
        self._wait(codes or [0] * size)

    def _wait(self, wanted: Sequence[int]) -> None:
        end = time.monotonic() + SECONDS
        while True:
            found = [process.poll() for process in self._running]
            wrong = [f not in (None, w) for f, w in zip(found, wanted, strict=True)]
            if any(wrong) or time.monotonic() > end:
                texts = [self._text(r).read_text() for r in range(len(found))]
                pytest.fail(f"exit codes {found}\n" + "\n".join(texts))
            if None not in found:
                return
            time.sleep(0.005)

    def _text(self, rank: int) -> Path:
        return self.folder / f"output-{rank}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running:
            process.kill()
            process.wait()
