"""Fixtures of the tests of ringjax.tensorflow in ranks."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def tf() -> Any:
    """The module, which only ranks import."""
    import tensorflow

    return tensorflow


@pytest.fixture(scope="module")
def hvd() -> Any:
    """The module, which only ranks import."""
    import ringjax.tensorflow

    return ringjax.tensorflow
