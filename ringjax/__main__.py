"""The command `ringjax`, also `python -m ringjax`, with its subcommands.

Each subcommand is a module with a function `main`. The command `ringrun` starts jobs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name -> (module, help text)
COMMANDS = {
    "doctor": ("ringjax.doctor.cli", "what would keep a job from running well here?"),
    "jax-collectives": (
        "ringjax.settings.mpi_library",
        "variables with which ringjax carries JAX's collectives",
    ),
    "explain": ("ringjax.explain", "what to do about an error, by its name or text"),
    "top": ("ringjax.top.cli", "a running job: its ranks, who is late, what happened"),
}


def _usage() -> str:
    lines = [f"  {name:<15}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: ringjax COMMAND [options]", "", *lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(_usage(), end="")
        return 0
    if not words or words[0] not in COMMANDS:
        sys.stderr.write(_usage())
        return 2
    module = importlib.import_module(COMMANDS[words[0]][0])
    return int(module.main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
