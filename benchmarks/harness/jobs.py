"""A job of ringrun whose ranks run a module of the benchmarks and report JSON.

For measurements without peers and turns: memory, start-up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "REPORT "  # begins a line that `report` has written
Row = dict[str, Any]


def report(row: Mapping[str, Any]) -> None:
    """Prints a row, in a line that `reports` finds in other output."""
    print(MARK + json.dumps(row), flush=True)


def reports(text: str) -> list[Row]:
    """Returns the rows in the output of a process, or of ringrun."""
    found = (line.partition(MARK)[2] for line in text.splitlines())
    return [json.loads(line) for line in found if line]


def run(
    ranks: int,
    module: str,
    *words: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> list[Row]:
    """Runs `python -m module words` on `np` ranks; returns the reported rows.

    Raises:
      RuntimeError: the job failed; the text has the end of the output.
      subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    python = [sys.executable, "-m"]
    job = [*python, "ringjax.run", "-np", str(ranks), *options, *python, module, *words]
    done = subprocess.run(
        job, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    found = reports(done.stdout)
    if done.returncode or not found:
        raise RuntimeError(
            f"{ranks} ranks of {module}: exit code {done.returncode}\n"
            f"{done.stderr[-3000:]}"
        )
    return found
