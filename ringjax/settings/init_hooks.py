"""What `ringjax.init` calls on floors above its own, which it must not import.

The package's top fills this in: it alone knows the modules of every floor.
"""

from __future__ import annotations

from collections.abc import Callable

# Load what `init` needs to ask JAX for its devices and to form groups.
load_jax_support: list[Callable[[], object]] = []
