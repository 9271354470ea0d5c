"""Hooks of `ringjax.init`: functions of higher layers, which `init` must not import.

`ringjax/__init__.py` registers them, because only that module may import every layer.
"""

from __future__ import annotations

from collections.abc import Callable

# Functions that load the modules by which `init` asks JAX for devices and forms groups.
load_jax_support: list[Callable[[], object]] = []
