"""Includes files from outside `docs/` as pages, and repairs links that leave `docs/`.

If the first line of a page is a link to another file of the repository, the page shows
that file, and then its own further lines. A link to an included file leads to its page.
A link to any other file of the repository leads to the repository's address, or becomes
the path of the file if there is no address yet.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
_NAME_FOR = re.compile(r"\[[^\]]*\]\((\.\./[^)]+\.md)\)\n")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)#:\s]+)(#[^)\s]*)?\)")


def stands_for(page: Path) -> Path | None:
    """Returns the file outside `docs/` that a page includes, if it includes one."""
    found = _NAME_FOR.match(page.read_text())
    return (page.parent / found[1]).resolve() if found else None


def names() -> dict[Path, Path]:
    """Maps each included file to its page."""
    pages = {stands_for(page): page for page in DOCS.rglob("*.md")}
    return {file: page for file, page in pages.items() if file}


def relinked(text: str, origin: Path, page: Path, repository: str) -> str:
    """Returns `text` of the file `origin` with its links rewritten for `page`."""
    known = names()

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        file = (origin.parent / target).resolve()
        file = known.get(file, file)
        if file.is_relative_to(DOCS):
            return f"{words}({os.path.relpath(file, page.parent)}{anchor})"
        kind = "tree" if file.is_dir() else "blob"
        path = file.relative_to(ROOT)
        if not repository:  # no address yet: print the path instead
            return f"{words[1:-1]} (`{path}`)"
        return f"{words}({repository}/{kind}/main/{path}{anchor})"

    return _LINK.sub(link, text)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        origin = stands_for(page)
        text = source[0]
        if origin:
            app.env.note_dependency(str(origin))
            moved = relinked(origin.read_text(), origin, page, app.config.repository)
            text = moved + "\n" + text.partition("\n")[2]
        source[0] = relinked(text, page, page, app.config.repository)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("repository", "", "env")
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
