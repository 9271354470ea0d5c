"""The version of this ringjax."""

from __future__ import annotations


def version() -> str:
    """Returns the version of the installed package, which is `ringjax.__version__`."""
    from importlib import metadata

    try:
        return metadata.version("ringjax")
    except metadata.PackageNotFoundError:
        return "0.0.0+checkout"
