"""Horovod's place for elastic states; only hands them on."""

from ringjax.elastic import ObjectState, State, notification_manager, run_fn

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
