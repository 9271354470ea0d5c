"""The part of this process in its job, for programs and the other modules of ringjax.

Functions for all jobs are in lifecycle.py, functions for elastic jobs in
elastic_requests.py, functions for groups of processes in groups.py.
"""

from __future__ import annotations

import warnings

from ringjax.runtime.elastic_requests import (
    check_updates,
    confirm,
    elastic,
    epoch_info,
    has_run_solo,
    is_newcomer,
    last_contributors,
    leave_at_next_pause,
    pause,
    private_communicator,
    request_admission,
    restart,
    solo_mode,
)
from ringjax.runtime.groups import (
    between_groups,
    group_rank,
    group_size,
    refuse_groups,
    replica_set,
)
from ringjax.runtime.lifecycle import (
    ProcessSet,
    add_process_set,
    communicator,
    config,
    cross_rank,
    cross_size,
    current,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    lane,
    local_rank,
    local_size,
    on_fresh_start,
    on_init,
    on_shutdown,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from ringjax.world.epoch_info import EpochInfo

__all__ = [
    "EpochInfo",
    "ProcessSet",
    "add_process_set",
    "between_groups",
    "check_updates",
    "communicator",
    "config",
    "confirm",
    "cross_rank",
    "cross_size",
    "current",
    "elastic",
    "epoch_info",
    "global_process_set",
    "group_rank",
    "group_size",
    "has_run_solo",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_newcomer",
    "lane",
    "last_contributors",
    "leave_at_next_pause",
    "local_rank",
    "local_size",
    "on_fresh_start",
    "on_init",
    "on_shutdown",
    "pause",
    "private_communicator",
    "rank",
    "refuse_groups",
    "remove_process_set",
    "replica_set",
    "request_admission",
    "restart",
    "shutdown",
    "size",
    "solo_mode",
]

# Names that are accepted, with a warning, until the next release.
_FORMER_NAMES = {
    "Generation": "EpochInfo",
    "admit": "request_admission",
    "generation": "epoch_info",
    "has_called_alone": "has_run_solo",
    "rehearsal": "solo_mode",
}


def __getattr__(name: str) -> object:
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module 'ringjax.runtime' has no attribute {name!r}")
    new = _FORMER_NAMES[name]
    text = f"ringjax.runtime.{name} is ringjax.runtime.{new} now"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return globals()[new]
