"""Every example in a docstring runs, as a job of one rank in a process of its own."""

from __future__ import annotations

import subprocess
import sys

# Without collections of garbage: every framework is loaded, and looked through in each.
SCRIPT = """
import doctest, gc, importlib, pkgutil, sys
gc.disable()
import ringjax

failed = attempted = 0
for module in pkgutil.walk_packages(ringjax.__path__, "ringjax."):
    if not module.name.endswith("__main__"):
        result = doctest.testmod(importlib.import_module(module.name))
        failed, attempted = failed + result.failed, attempted + result.attempted
ringjax.shutdown()
print(attempted, "examples")
gc.freeze()
sys.exit(failed > 0)
"""


def test_the_examples_in_docstrings_run() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=55
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # None found would be a test that cannot fail.
    assert int(ended.stdout.split()[-2]) > 20, ended.stdout
