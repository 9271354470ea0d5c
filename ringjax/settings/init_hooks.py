"""Hooks that `ringjax.init` calls: functions of layers that `init` must not import.

`ringjax/__init__.py` registers the hooks, because only it may import every layer.
"""

from __future__ import annotations

from collections.abc import Callable

# Functions that load the modules with which `init` selects devices and forms groups.
load_jax_support: list[Callable[[], object]] = []
# Functions to call in a program that has imported JAX, which need JAX's modules.
watch_jax: list[Callable[[], object]] = []
