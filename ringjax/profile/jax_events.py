"""JAX's own traces, moved to the time base and beside the right rank.

jax.profiler writes Chrome's trace events whose times count from a moment that its
protobuf tells (world/jax_trace.py). Its numbers of processes are alike on all ranks. Of
our operations XLA has made `ringjax_allreduce.7`: here they have their names again.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

from ringjax.profile.clocks import TimeBase
from ringjax.profile.parts import Part

OURS = re.compile(r"^ringjax_(\w+)(?:\.\d+)*$")
PIDS = 1_000_000  # times the rank's number and one, added to jax's own


def events(part: Part, base: TimeBase) -> Iterator[dict[str, Any]]:
    """Of one rank; none if it has no trace of JAX's.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    if part.jax is None:
        return
    path, began = part.jax
    shift = base.seconds(part, began - part.realtime + part.monotonic) * 1e6
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    for event in found:
        if "pid" not in event:
            continue  # an empty one closes the list
        event["pid"] = int(event["pid"]) + PIDS * (part.number + 1)
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
        if ours := OURS.match(event.get("name", "")):
            event["name"] = f"ringjax.{ours[1]}"
        arguments = event.get("args", {})
        if event.get("name") == "process_name":
            arguments["name"] = f"{part.title}: jax {arguments.get('name', '')}"
        elif event.get("name") == "process_sort_index":
            arguments["sort_index"] = event["pid"]
        yield event
