"""The cells of the notebook of the site run one after the other in one process.

`make docs` runs them in the kernel of Jupyter, which would be 100 MB for these tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.launch import ROOT, environment

NOTEBOOK = json.loads((ROOT / "docs" / "start" / "notebook.ipynb").read_text())
# Prints the value of each expression, as an interactive session does.
SCRIPT = """
import ast, sys
for number, cell in enumerate({cells!r}):
    body = ast.parse(cell).body
    exec(compile(ast.Interactive(body), f"cell {{number}}", "single"), globals())
"""


def _cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


@pytest.mark.timeout(90)
def test_every_cell_runs() -> None:
    cells = ["".join(cell["source"]) for cell in _cells("code")]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT.format(cells=cells)],
        env=environment("notebook", {}),
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.splitlines()
    assert printed[0] == "['rank 0 of 2', 'rank 1 of 2']"
    for rank, line in enumerate(printed[1:3]):
        assert line.startswith(f"rank {rank}: loss 14"), line
        assert line.endswith("→ 0.000000, [0. 1. 2. 3. 4. 5. 6. 7.]"), line
    assert printed[3:] == [
        "True",
        "rank 1 failed: ValueError: no such file (exit code 1)",
    ]


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in _cells("code"):
        assert not cell["outputs"] and cell["execution_count"] is None


def test_the_links_of_the_notebook_exist() -> None:
    text = "".join("".join(cell["source"]) for cell in _cells("markdown"))
    targets = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert targets
    for target in targets:
        assert (ROOT / "docs" / "start" / target.partition("#")[0]).is_file(), target
