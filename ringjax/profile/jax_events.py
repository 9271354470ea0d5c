"""JAX's own traces, moved to the time base and beside the right rank.

jax.profiler writes Chrome's trace events whose times count from a moment that its
protobuf tells (world/jax_trace.py). Its numbers of processes are alike on all ranks. Of
our operations XLA has made `ringjax_allreduce.7`: here they have their names again.
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

OURS = re.compile(r"^ringjax_(\w+)(?:\.\d+)*$")
NOISE = "ThreadpoolListener::"  # three for every task of XLA's, without a length
PIDS = 1_000_000  # times the rank's number and one, added to jax's own


def events(part: ProfilePart, base: CommonClock, most: int) -> Iterator[dict[str, Any]]:
    """Of one rank, so many at most; none if it has no trace of JAX's.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    if part.jax is None:
        return
    path, began = part.jax
    shift = base.seconds(part, began - part.realtime + part.monotonic) * 1e6
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    # An empty one closes the list.
    found = [e for e in found if "pid" in e and not e["name"].startswith(NOISE)]
    if len(found) > most:
        found.sort(key=lambda event: event.get("ts", -math.inf))
        part.notes.append(f"jax's own trace: the first {most} of {len(found)} events")
    for event in found[:most]:
        event["pid"] = int(event["pid"]) + PIDS * (part.number + 1)
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
        if ours := OURS.match(event["name"]):
            event["name"] = f"ringjax.{ours[1]}"
        arguments = event.get("args", {})
        if event["name"] == "process_name":
            arguments["name"] = f"{part.title}: jax {arguments.get('name', '')}"
        elif event["name"] == "process_sort_index":
            arguments["sort_index"] = event["pid"]
        yield event
