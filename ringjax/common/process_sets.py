"""Horovod's place for process sets; only hands them on."""

from ringjax.runtime import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "remove_process_set",
]
