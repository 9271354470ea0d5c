"""The commands `python -m ringjax.profile show DIR` and `... merge DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ringjax import stdout
from ringjax.profile import merge, show


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ringjax.profile")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, meaning in (
        ("show", "print where the time went"),
        ("merge", "write profile.tar and profile.json.gz anew, and print it"),
    ):
        command = commands.add_parser(name, help=meaning, description=meaning)
        command.add_argument("directory", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        text = {"show": show, "merge": merge}[args.command](args.directory)
    except (OSError, ValueError) as error:
        print(f"ringjax.profile: {error}", file=sys.stderr)
        return 1
    with stdout.until_closed():
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
