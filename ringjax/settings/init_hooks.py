"""Hooks of `ringjax.init`: functions of higher layers, which `init` must not import.

`ringjax/__init__.py` registers the hooks, because only it may import every layer.
"""

from __future__ import annotations

from collections.abc import Callable

# Functions that load the modules that choose JAX's devices and form groups in `init`.
load_jax_support: list[Callable[[], object]] = []
