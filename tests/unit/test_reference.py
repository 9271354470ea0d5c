"""Every name of the API's reference is used in an example that some test runs.

Examples are those in docstrings (test_doctests.py), the Python blocks of the pages
(tests/ranks/test_pages.py, test_recipes.py) and the cells of the notebook.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
from collections.abc import Iterator

import pytest
from support.launch import ROOT

NAMES = re.compile(r"```\{ringjax-names\} (\S+)\n(?::names: (.*)\n)?")
# Nobody writes them: what `profile` returns, what a command runs, what never comes.
WITHOUT = {"Profile", "compute_worker_fn", "HorovodVersionMismatchError"}


def _in_docstrings() -> Iterator[str]:
    parser = doctest.DocTestParser()
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in (ROOT / "ringjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, holders) else None
            for example in parser.get_examples(text) if text else ():
                if not example.options.get(doctest.SKIP):
                    yield example.source


def _on_pages() -> Iterator[str]:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        yield from re.findall(r"(?ms)^```python\n(.*?)^```", path.read_text())
    for cell in json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])


def _public(module: str) -> list[str]:
    """`__all__`, or what `ringjax.torch` and its like hand on: `import x as x`."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [a.name for node in imported for a in node.names if a.asname == a.name]
    names += [
        n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    ]
    return [name for name in names if name[0] != "_"]


REFERENCE = [
    (module, names)
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for module, names in NAMES.findall(page.read_text())
]


@pytest.fixture(scope="module")
def examples() -> str:
    return "\n".join([*_in_docstrings(), *_on_pages()])


@pytest.mark.parametrize(("module", "names"), REFERENCE)
def test_a_name_has_an_example_that_runs(
    module: str, names: str, examples: str
) -> None:
    listed = names.split() or _public(module)
    assert listed
    unused = {n for n in listed if not re.search(rf"\b{n}\b", examples)}
    assert not unused - WITHOUT
