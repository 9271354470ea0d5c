"""Runs a test file of JAX in one process, and writes which calls ringjax carried.

Usage: ``python worker.py FILE CALLS [options of jax/_src/test_multiprocess.py]``

At its end it writes to the file CALLS, as JSON, the number of calls of each collective
on this process.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from support.jax_calls import count_calls


def main() -> None:
    file, calls, *options = sys.argv[1:]
    sys.argv = [file, *options]
    try:
        # JAX starts the tests only if the file is the main module.
        runpy.run_path(file, run_name="__main__")
    finally:
        Path(calls).write_text(json.dumps(count_calls()))


main()
