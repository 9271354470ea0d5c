"""One version: pyproject.toml says it, and everything else must say the same.

    python -m release.version [TAG]

Prints it. Fails if the changelog does not begin with it, if CITATION.cff or the recipe
for conda has another one, or if TAG is not `v` and it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "release/conda/recipe.yaml"


def version() -> str:
    """Of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    return str(tomllib.loads(text)["project"]["version"])


def said(file: str, pattern: str) -> str:
    """What the first match of `pattern` in a file of the repository says."""
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    return found[1] if found else ""


def check(tag: str = "") -> str:
    """The version, if all agree on it.

    Raises:
        ValueError: naming who says something else.
    """
    wanted = version()
    others = {
        "the head of CHANGELOG.md": said("CHANGELOG.md", r"^## (\S+)"),
        "CITATION.cff": said("CITATION.cff", r"^version: (\S+)"),
        RECIPE: said(RECIPE, r'^  version: "(\S+)"'),
        "the tag": tag.removeprefix("v") if tag else wanted,
    }
    for who, other in others.items():
        if other != wanted:
            raise ValueError(
                f"pyproject.toml says {wanted}, {who} {other or 'nothing'}"
            )
    if tag and tag != f"v{wanted}":
        raise ValueError(f"the tag of {wanted} is v{wanted}, not {tag}")
    return wanted


if __name__ == "__main__":
    print(check(*sys.argv[1:2]))
