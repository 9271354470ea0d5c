"""A training in pieces in one process without ringrun, which is asked for digests."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Self

from support.launch import environment

SWEEP_PROGRAM = Path(__file__).with_name("sweep_program.py")


class Reference:
    """The digests of a model after each step, computed when they are asked for.

    The process makes as many steps as the longest job that is compared with it.
    """

    def __init__(self, model: str) -> None:
        self.digests: list[str] = []
        # In jobs, ringrun sets RINGJAX_SAME_BITS by its option --same-bits.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SWEEP_PROGRAM), "0", model],
            env=environment(uuid.uuid4().hex[:12], {"RINGJAX_SAME_BITS": "1"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def after(self, steps: int) -> str:
        """Returns the digest after so many steps."""
        while len(self.digests) < steps:
            self.digests.append(self._ask())
        return self.digests[steps - 1]

    def replay(self) -> Replay:
        """Returns the training before its first step, for `chaos.faults.ChaosJob`."""
        return Replay(self)

    def _ask(self) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        digest = self._process.stdout.readline().strip()
        assert digest, "the process with which jobs are compared has ended"
        return digest


class Replay:
    """The training of a `Reference`, step by step."""

    def __init__(self, reference: Reference) -> None:
        self._reference, self._steps = reference, 0

    def step(self, workers: list[int]) -> str:
        """Returns the digest after the next step, which depends on no worker."""
        del workers
        self._steps += 1
        return self._reference.after(self._steps)
