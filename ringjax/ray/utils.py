"""Horovod's functions for programs that use `runner.Coordinator` themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import ray

from ringjax.ray.adapter import get_setting
from ringjax.ray.ray_types import ActorHandle, ObjectRef, Result

T = TypeVar("T")


def detect_nics(
    settings: object,
    all_host_names: Sequence[str] = (),
    node_workers: Sequence[ActorHandle] | None = None,
) -> list[str]:
    """Returns the network interfaces that the settings allow.

    Without interfaces, ringjax tries all addresses of a host in turn.
    """
    return sorted(get_setting(settings, "nics") or ())


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables that restrict workers to these interfaces."""
    named = ",".join(nics)
    return {"RINGJAX_NETWORK_INTERFACES": named} if named else {}


def map_blocking(fn: Callable[[T], ObjectRef], collection: Iterable[T]) -> list[Result]:
    """Calls `fn` for each element, and waits for the results of all references."""
    return list(ray.get([fn(item) for item in collection]))
