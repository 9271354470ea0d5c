"""Horovod's module path of `RayExecutor` and its parts; it only imports them."""

from ringjax.ray.coordinator import Coordinator
from ringjax.ray.executor import MiniSettings, RayExecutor
from ringjax.ray.static_jobs import StaticAdapter, StaticParams

__all__ = [
    "Coordinator",
    "MiniSettings",
    "RayExecutor",
    "StaticAdapter",
    "StaticParams",
]
