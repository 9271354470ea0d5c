"""Horovod's place for placement groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax.ray.actors import group_of


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
) -> tuple[Any, list[dict[str, float]]]:
    """A placement group of equal bundles, once there is room for all of them.

    Returns:
        The group and its bundles.

    Raises:
        TimeoutError: there is not enough room; it says what is missing.
    """
    bundle = dict(resources_per_bundle)
    group = group_of(bundle, num_bundles, pg_strategy, pg_timeout)
    return group, [dict(bundle) for _ in range(num_bundles)]
