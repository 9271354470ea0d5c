"""The entry point in the group `jax_plugins`: JAX calls it before its first client.

JAX imports this module in every program of an environment that has ringjax, so it
imports no other module unless the program asks for it.
"""

from __future__ import annotations

import os


def initialize() -> None:
    """Runs JAX's own collectives on ringjax if RINGJAX_JAX_COLLECTIVES is set."""
    if os.environ.get("RINGJAX_JAX_COLLECTIVES", "") in ("", "0"):
        return
    from ringjax.config import Config

    if Config.from_env().jax_collectives:
        from ringjax.xla import jax_collectives

        jax_collectives.enable()
