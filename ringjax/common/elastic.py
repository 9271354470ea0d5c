"""Makes the classes of elastic states importable from Horovod's module path."""

from ringjax.elastic import ObjectState as ObjectState
from ringjax.elastic import State as State
from ringjax.elastic import notification_manager as notification_manager
from ringjax.elastic import run_fn as run_fn
