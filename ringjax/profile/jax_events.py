"""Converts JAX's own traces, so that the traces of all ranks fit into one file.

jax.profiler writes Chrome's trace events. The times of these events count from a moment
that the protobuf of the trace contains (world/profile_recording.py), and the process
ids of these events are equal on all ranks. This module converts the times to the common
clock, and makes the process ids distinct. XLA's name `ringjax_allreduce.7` becomes
`ringjax.allreduce`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from ringjax.profile.clocks import CommonClock
from ringjax.profile.parts import ProfilePart

RINGJAX_NAME = re.compile(r"^ringjax_(\w+)(?:\.\d+)*$")
NOISE = "ThreadpoolListener::"  # the prefix of events to drop: three per task of XLA
PIDS_PER_RANK = 1_000_000  # greater than all process ids of JAX


def events(
    part: ProfilePart, clock: CommonClock, most: int
) -> Iterator[dict[str, Any]]:
    """Yields at most `most` events of one rank, or no event if it has no JAX trace.

    Raises OSError or ValueError if the trace cannot be read.
    """
    if part.jax is None:
        return
    path, began = part.jax
    shift = clock.seconds(part, began - part.realtime + part.monotonic) * 1e6
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    # JAX ends the list with an empty event, which has no "pid".
    found = [e for e in found if "pid" in e and not e["name"].startswith(NOISE)]
    if len(found) > most:
        found.sort(key=lambda event: event.get("ts", -math.inf))
        part.notes.append(f"jax's own trace: the first {most} of {len(found)} events")
    for event in found[:most]:
        event["pid"] = int(event["pid"]) + PIDS_PER_RANK * (part.number + 1)
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
        if match := RINGJAX_NAME.match(event["name"]):
            event["name"] = f"ringjax.{match[1]}"
        arguments = event.get("args", {})
        if event["name"] == "process_name":
            arguments["name"] = f"{part.title}: jax {arguments.get('name', '')}"
        elif event["name"] == "process_sort_index":
            arguments["sort_index"] = event["pid"]
        yield event
