"""Which ringjax this is."""

from __future__ import annotations


def version() -> str:
    """The version of the installed package, also as `ringjax.__version__`."""
    from importlib import metadata

    try:
        return metadata.version("ringjax")
    except metadata.PackageNotFoundError:
        return "0.0.0+checkout"
