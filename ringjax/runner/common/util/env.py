"""Makes `get_env_rank_and_size` importable from Horovod's module path."""

from ringjax.horovod.functions import get_env_rank_and_size

__all__ = ["get_env_rank_and_size"]
