"""Every example in a docstring runs, as a job of one rank.

Modules with PyTorch run in another process than modules with TensorFlow, for the reason
that tests/support/frameworks.py gives.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import environment

# Garbage collection is off, because each one would scan all loaded frameworks.
SCRIPT = """
import doctest, gc, importlib, importlib.util, pathlib, sys
gc.disable()
import ringjax

ENGINES = {"ray": "ray", "spark": "pyspark", "mxnet": "mxnet"}
ENGINES["lightning"] = "lightning"
root = pathlib.Path(ringjax.__file__).parent
failed = attempted = 0
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    needs_torch = any(part.startswith(("torch", "lightning")) for part in parts)
    if parts[-1] == "__main__" or needs_torch != (sys.argv[1] == "torch"):
        continue
    if parts[1] in ENGINES and importlib.util.find_spec(ENGINES[parts[1]]) is None:
        continue  # these modules import the engine at their top
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    failed, attempted = failed + result.failed, attempted + result.attempted
ringjax.shutdown()
assert not {"tensorflow", "torch"} <= sys.modules.keys()
print(attempted, "examples")
gc.freeze()
sys.exit(failed > 0)
"""


@pytest.mark.parametrize(("framework", "least"), [("torch", 5), ("tensorflow", 20)])
def test_the_examples_in_docstrings_run(framework: str, least: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, framework],
        env=environment("doctests", {"KERAS_BACKEND": framework}),
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Without this check, a test that finds no example would pass.
    assert int(ended.stdout.split()[-2]) > least, ended.stdout
