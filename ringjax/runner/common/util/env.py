"""Horovod's module path of `get_env_rank_and_size`; it only imports the function."""

from ringjax.horovod.functions import get_env_rank_and_size

__all__ = ["get_env_rank_and_size"]
