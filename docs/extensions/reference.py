"""Directives that write the reference pages from the code.

`{ringjax-settings}` is `ringjax.config`, `{ringrun-options}` the parser of the command
line, and `{ringjax-names} MODULE` describes the public names of a module: those of its
`:names:`, or all of them.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterator

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import _MockObject, mock
from sphinx.util.docutils import SphinxDirective

import ringjax
from ringjax.config import Config
from ringjax.run.options import build_parser

_STAND_INS = contextlib.ExitStack()
atexit.register(_STAND_INS.close)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def settings() -> Iterator[str]:
    """Yields the lines of a Markdown table of all settings."""
    yield "| variable | default | meaning |"
    yield "| --- | --- | --- |"
    for _, names, default, _, meaning in Config().table():
        first, *others = names.split()
        also = "".join(f"<br>`{name}`" for name in others)
        shown = f"`{default}`" if default else ""
        yield f"| `{first}`{also} | {shown} | {_cell(meaning)} |"


def _flags(action: argparse.Action) -> str:
    value = action.metavar or ""
    value = " ".join(value) if isinstance(value, tuple) else value
    takes = f" {value}" if value and action.nargs != 0 else ""
    return ", ".join(f"`{flag}{takes}`" for flag in action.option_strings)


def options() -> Iterator[str]:
    """Yields all options of ringrun in their groups, as definition lists."""
    for group in build_parser("")._action_groups:
        shown = [a for a in group._group_actions if a.option_strings]
        shown = [a for a in shown if a.help != argparse.SUPPRESS]
        if not shown:
            continue
        title = "ranks and hosts" if group.title == "options" else str(group.title)
        yield from ("", f"## {title[0].upper()}{title[1:]}", "")
        if all(a.help is None for a in shown):
            yield ", ".join(map(_flags, shown)) + "."
            continue
        if group.description:
            yield from (group.description, "")
        for action in shown:
            yield from (_flags(action), f": {action.help or 'as ssh has it'}", "")


def public_names(module: str) -> list[str]:
    """Returns `__all__`, or the names that a module defines or reexports.

    A module reexports names by `import x as x` and by `from module import *`.
    """
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    tree = ast.parse(inspect.getsource(loaded))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    aliases = [(str(node.module), alias) for node in imported for alias in node.names]
    handed: list[str] = []
    for source, alias in aliases:
        if alias.name == "*":
            handed += public_names(source)
        elif alias.asname == alias.name:
            handed.append(alias.name)
    own = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names = [name for name in dict.fromkeys(handed + own) if name[0] != "_"]
    return [name for name in names if not inspect.ismodule(getattr(loaded, name))]


def _of_ringjax(name: str, value: object) -> bool:
    return name in ringjax.__all__ and getattr(ringjax, name) is value


def described(module: str, names: list[str]) -> Iterator[str]:
    """Yields directives for autodoc; names of `ringjax` itself are links elsewhere."""
    loaded = importlib.import_module(module)
    known, constants = [], []
    for name in names:
        value = getattr(loaded, name)
        if module != "ringjax" and _of_ringjax(name, value):
            known.append(f":py:obj:`~ringjax.{name}`")
        elif inspect.isclass(value):
            yield from (f".. autoclass:: {module}.{name}", "   :members:", "")
        elif inspect.isroutine(value):
            yield from (f".. autofunction:: {module}.{name}", "")
        elif inspect.ismodule(value):
            raise ValueError(f"{module}.{name} is a module: name what is in it")
        else:
            constants.append(f"``{name}``")
    if constants:
        yield from ("", "Constants and objects: " + ", ".join(constants) + ".", "")
    if known:
        yield from ("", "The same as in ``ringjax``: " + ", ".join(known) + ".", "")


class _FromTheCode(SphinxDirective):
    optional_arguments = 1
    option_spec = {"names": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        if self.name == "ringjax-settings":
            lines = list(settings())
        elif self.name == "ringrun-options":
            lines = list(options())
        else:
            lines = ["```{eval-rst}", *self._names(self.arguments[0]), "```"]
        text = "\n".join(lines).split("\n")
        parent = nodes.Element()
        self.state.nested_parse(StringList(text, self.name), 0, parent, match_titles=1)
        return parent.children

    def _names(self, module: str) -> Iterator[str]:
        wanted = self.options.get("names", "").split() or public_names(module)
        yield from described(module, wanted)


def _without_frameworks(app: Sphinx, config: object) -> None:
    """Mocks the frameworks, because autodoc only reads the sources of the adapters."""
    _STAND_INS.enter_context(mock(app.config.autodoc_mock_imports))
    # Aliases of types are evaluated: `list[int] | tf.Tensor`.
    _MockObject.__or__ = _MockObject.__ror__ = lambda self, _: self
    # The mock of TensorFlow's decorator would replace the functions.
    stand_in = types.ModuleType("ringjax.tensorflow.autograph")
    stand_in.do_not_convert = lambda function: function  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("config-inited", _without_frameworks)
    for name in ("ringjax-settings", "ringrun-options", "ringjax-names"):
        app.add_directive(name, _FromTheCode)
    return {"parallel_read_safe": True}
