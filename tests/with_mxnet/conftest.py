"""Imports MXNet before the tests, with numpy's warnings about names that it uses.

`make test-mxnet` runs these files, in an environment without JAX. Plain pytest does not
collect them, because they are not named test_*.py.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """Ignores warnings that concern only MXNet's own code, which nobody maintains."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:mxnet")
