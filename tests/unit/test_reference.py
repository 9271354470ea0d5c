"""Tests that an example uses every name of the API reference.

Examples are code in docstrings (test_doctests.py), Python blocks of the pages
(tests/docs/test_pages.py, test_recipes.py) and cells of the notebook. Other tests run
the examples.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
from collections.abc import Iterator
from pathlib import Path

from support.tree import Tree, expect_offences, report

NOTEBOOK = "docs/start/notebook.ipynb"
NAMES = r"```\{ringjax-names\} (\S+)\n(?::names: (.*)\n)?"
# Names that no program uses: the result of `profile`, a command's function, and an
# error of old versions.
WITHOUT = {"Profile", "compute_worker_fn", "HorovodVersionMismatchError"}


def _examples(tree: Tree) -> Iterator[str]:
    parser = doctest.DocTestParser()
    for path in tree.files("ringjax", ".py"):
        for text in tree.module(path).docstrings:
            for example in parser.get_examples(text):
                if not example.options.get(doctest.SKIP):
                    yield example.source
    for page in ["README.md", *tree.files("docs", ".md")]:
        yield from re.findall(r"(?ms)^```python\n(.*?)^```", tree.text(page))
    for cell in json.loads(tree.text(NOTEBOOK))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])


def _public(tree: Tree, module: str) -> list[str]:
    """Returns the names in `__all__`, or else the names imported by `import x as x`."""
    path = module.replace(".", "/")
    package = (tree.root / path).is_dir()
    code = ast.parse(tree.text(f"{path}/__init__.py" if package else f"{path}.py"))
    for node in code.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    imported = [node for node in ast.walk(code) if isinstance(node, ast.ImportFrom)]
    names = [a.name for node in imported for a in node.names if a.asname == a.name]
    names += [
        n.name for n in code.body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    ]
    return [name for name in names if name[0] != "_"]


def names_have_an_example(tree: Tree) -> Iterator[str]:
    used = {word for text in _examples(tree) for word in re.findall(r"\w+", text)}
    pages = tree.files("docs/reference/api", ".md")
    blocks = [block for page in pages for block in tree.matches(NAMES, page)]
    assert blocks, "no page has a block of names"
    for place, block in blocks:
        listed = (block[2] or "").split() or _public(tree, block[1])
        if not listed:
            yield f"{place}: {block[1]} has no public name"
        for name in listed:
            if name not in used | WITHOUT:
                yield f"{place}: no example uses {name} of {block[1]}"


def test_every_public_name_has_an_example() -> None:
    report(names_have_an_example)


def test_names_without_an_example_are_reported(tmp_path: Path) -> None:
    files = {
        "README.md": "```python\none()\n```\n",
        NOTEBOOK: '{"cells": [{"cell_type": "code", "source": ["two"]}]}',
        "docs/reference/api/a.md": """
```{ringjax-names} ringjax.a
```{ringjax-names} ringjax.a
:names: one gone
```{ringjax-names} ringjax.b
```{ringjax-names} ringjax.c
```{ringjax-names} ringjax.d
""",
        "ringjax/a.py": "__all__ = ['one', 'two', 'three', 'skipped']",
        "ringjax/b/__init__.py": "from x import four as four, y\nclass Five: ...",
        "ringjax/c.py": "def f():\n  '>>> three()\\n>>> skipped() # doctest: +SKIP'",
        "ringjax/d.py": "_private = 1",
    }
    page = "docs/reference/api/a.md"
    expected = [f"{page}:2: no example uses skipped of ringjax.a"]
    expected += [f"{page}:3: no example uses gone of ringjax.a"]
    expected += [
        f"{page}:5: no example uses {x} of ringjax.b" for x in ("four", "Five")
    ]
    expected += [f"{page}:6: no example uses f of ringjax.c"]
    expected += [f"{page}:7: ringjax.d has no public name"]
    expect_offences([names_have_an_example], tmp_path, files, *expected)
