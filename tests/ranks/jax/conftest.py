"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def x64(world: object) -> Iterator[None]:
    """Enables 64-bit dtypes of JAX during a test."""
    with jax.enable_x64(True):
        yield
