"""Fixtures that several files of this folder share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def tf() -> Any:
    """Imported in ranks only."""
    import tensorflow

    return tensorflow


@pytest.fixture(scope="module")
def hvd() -> Any:
    """Imported in ranks only."""
    import ringjax.tensorflow

    return ringjax.tensorflow
