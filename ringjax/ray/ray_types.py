"""Names for the objects of Ray in annotations, because Ray has no types for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# Ray's handle of an actor: its methods have `.remote(...)`, which returns an ObjectRef.
ActorHandle: TypeAlias = Any
# Ray's reference to the result of a remote call.
ObjectRef: TypeAlias = Any
# A `ray.util.queue.Queue`.
RayQueue: TypeAlias = Any
# A scheduling strategy of Ray: an object, or the name of a strategy.
SchedulingStrategy: TypeAlias = Any

# A function that a worker calls with its executable, and the result of the function.
Task: TypeAlias = Callable[[Any], Any]
Result: TypeAlias = Any
# Functions in the driver that receive the messages of `ray_logger.log`.
Callbacks: TypeAlias = Sequence[Callable[[Any], None]]
