"""Reads the warnings about different parameters (`RINGJAX_CHECK_PARAMETERS`)."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

from ringjax import eager, runtime

_WARNING = re.compile(r"warning: the ranks' parameters differ at \D*(\d+)[^:]*: (.*?);")


def check_every(monkeypatch, steps: int) -> None:
    """Sets RINGJAX_CHECK_PARAMETERS to `steps` for one test."""
    config = replace(runtime.config(), check_parameters=steps)
    monkeypatch.setattr(runtime, "config", lambda: config)


def read_warnings(capfd) -> list[tuple[int, str]]:
    """Waits for all ranks' checks. Returns step and difference of each warning."""
    return [(int(step), what) for step, what in _WARNING.findall(errors(capfd))]


def errors(capfd) -> str:
    """Waits for all ranks' checks. Returns all text on standard error."""
    for thread in threading.enumerate():
        if thread.name == "ringjax-tensorflow-check":
            thread.join(30)
    eager.barrier()
    return capfd.readouterr().err


def warning_of_rank_0(world, step: int, name: str, rank: int) -> list[tuple[int, str]]:
    """Returns the warning that rank 0 must print if `name` differs only on `rank`.

    Returns:
        A list with the step and the text on rank 0; empty on other ranks.
    """
    right = 0 if rank else 1
    text = f"'{name}' of rank {rank} is not that of rank {right}"
    return [] if world.rank else [(step, text)]
