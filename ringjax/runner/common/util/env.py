"""Horovod's place for what the environment says; only hands it on."""

from ringjax.horovod.functions import get_env_rank_and_size

__all__ = ["get_env_rank_and_size"]
