"""Horovod's odds and ends for backends of one's own; beside `runner.Coordinator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from ringjax.ray.adapter import get_setting


def detect_nics(
    settings: Any,
    all_host_names: Sequence[str] = (),
    node_workers: Sequence[Any] | None = None,
) -> list[str]:
    """The settings' network interfaces; none: ringjax tries the addresses in turn."""
    return sorted(get_setting(settings, "nics") or ())


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """Variables that have the workers use these network interfaces."""
    named = ",".join(nics)
    return {"RINGJAX_NETWORK_INTERFACES": named} if named else {}


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """The results behind the references that a function returns for each item."""
    return list(ray.get([fn(item) for item in collection]))
