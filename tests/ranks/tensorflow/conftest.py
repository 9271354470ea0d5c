"""Fixtures of the tests of ringjax.tensorflow in ranks."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def tf() -> Any:
    """Returns the module tensorflow, which only ranks import because that is slow."""
    import tensorflow

    return tensorflow


@pytest.fixture(scope="module")
def hvd() -> Any:
    """Returns the module ringjax.tensorflow, which imports TensorFlow."""
    import ringjax.tensorflow

    return ringjax.tensorflow
