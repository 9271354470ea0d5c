"""Horovod's place for elastic states; only hands them on."""

from ringjax.elastic import ObjectState as ObjectState
from ringjax.elastic import State as State
from ringjax.elastic import notification_manager as notification_manager
from ringjax.elastic import run_fn as run_fn
