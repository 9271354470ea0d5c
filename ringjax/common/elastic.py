"""Horovod's module path of elastic states; it only imports them."""

from ringjax.elastic import ObjectState as ObjectState
from ringjax.elastic import State as State
from ringjax.elastic import notification_manager as notification_manager
from ringjax.elastic import run_fn as run_fn
