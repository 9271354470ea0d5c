"""What this rank has exchanged so far: sums of all its calls, and the last of them.

The core's recorder hears of every call (`xla_ext/engine/recorder/`). A call has three
instants on the clock of its own process: it came, all ranks had come, it was over. What
is before the second is waiting for other ranks, what is after it moves data.
"""

from __future__ import annotations

from typing import Any

from ringjax import runtime
from ringjax.world.communicator_ids import EAGER_LANE


def stats(*, buckets: bool = False) -> dict[str, Any]:
    """Sums of all that this rank has exchanged since `init`, as numbers and dicts.

    Costs some microseconds, and no communication: ranks compare what they like.

    Args:
        buckets: also sums of the last calls by what they carried, which costs a
            millisecond.

    Returns:
        ``rank``, ``size`` and ``epoch`` of now; ``calls``, of all lanes; and in
        ``process_sets``, by number (0 is the world) and lane, each collective. The
        lanes are ``compiled`` (in jit) and ``named`` (`ringjax.eager`, PyTorch,
        TensorFlow, Keras). Of a collective:

        * ``calls``, ``failures``; ``bytes`` of this rank's tensors
        * ``wait_seconds``: from the call (a named one: from its submission) until all
          ranks had come; ``most_waited`` is the longest of these
        * ``move_seconds``: from then on until the result was there; for CUDA devices
          until it was enqueued
        * ``device_seconds``: on the streams of CUDA devices, from where their turn came
          to their end, which is seen some moments later
        * ``wait_histogram``, ``move_histogram``: calls by time, the first below 1 µs,
          each further one below twice as much, the last all others

        Of several CUDA devices a process, calls and times are those of the first one,
        and ``bytes`` are of all.

        For the compiled lane there is also, of the present epoch, ``sent_bytes`` and
        ``algorithms`` of each collective, and ``exposed_seconds``: how long programs
        have waited at the end of a step for what overlaps with it.

        ``buckets``, if wanted, is a list: of the last 1,024 calls those that have the
        same ``set``, ``named``, ``op``, ``name`` and ``bytes`` (of one call), how many
        ``calls`` these are, and their ``wait_seconds`` and ``move_seconds``. A bucket
        of gradients that overlaps is one of these, a named tensor another.

    Raises:
        NotInitialized: before `init`.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> x = ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
        >>> seen = ringjax.stats()["process_sets"][0]["named"]["allreduce"]
        >>> seen["bytes"] >= 16, seen["failures"], len(seen["wait_histogram"])
        (True, 0, 26)
    """
    world = runtime.current("stats")
    totals = world.recorder.totals()
    sets: dict[int, dict[str, Any]] = {}
    for one in totals:
        lane = _lane(sets, one.pop("set"), one.pop("named"))
        lane[one.pop("op")] = one
    for number, communicator in world.communicators.items():
        if number >= EAGER_LANE:
            continue
        for op, more in communicator.stats().items():
            compiled = _lane(sets, number, named=False)
            if op == "overlap":
                compiled["exposed_seconds"] = more["exposed_seconds"]
            elif op in compiled:
                compiled[op] |= {k: more[k] for k in ("sent_bytes", "algorithms")}
    found = {
        "rank": world.rank_info.rank,
        "size": world.rank_info.size,
        "epoch": world.epoch.number,
        "calls": sum(one["calls"] for one in totals),
        "process_sets": sets,
    }
    if buckets:
        found["buckets"] = _by_bucket(world.recorder.events())
    return found


def _by_bucket(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in calls:
        key = {name: call[name] for name in ("set", "named", "op", "name", "bytes")}
        empty = {"calls": 0, "wait_seconds": 0.0, "move_seconds": 0.0}
        sums = found.setdefault(tuple(key.values()), key | empty)
        agreed = call["done"] if call["agreed"] is None else call["agreed"]
        sums["calls"] += 1
        sums["wait_seconds"] += agreed - call["entered"]
        sums["move_seconds"] += call["done"] - agreed
    return list(found.values())


def _lane(sets: dict[int, dict[str, Any]], number: int, named: bool) -> dict[str, Any]:
    lanes = sets.setdefault(number, {"compiled": {}, "named": {}})
    lane: dict[str, Any] = lanes["named" if named else "compiled"]
    return lane


def recent_calls() -> list[dict[str, Any]]:
    """The last calls of this rank, 1,024 at most, the oldest first.

    Also written to a file when the job ends with an error, whose name each rank then
    prints; `RINGJAX_RECORD_DIR` says where.

    Returns:
        For each ``op``, ``name``, ``named`` (of that lane), ``set``, ``epoch``,
        ``seq`` (its number there, the same on all ranks), ``bytes``, ``algorithm``
        (how the data travelled: "inline", "tiles" and "piggyback" through memory that
        the ranks share, else by the schedule of this name), ``device``, ``ok``, and
        ``entered``, ``agreed``, ``done`` in seconds of `time.monotonic`; ``agreed`` is
        None if not all ranks have come.

    Raises:
        NotInitialized: before `init`.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> x = ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
        >>> last = ringjax.recent_calls()[-1]
        >>> last["name"], last["entered"] <= last["agreed"] <= last["done"]
        ('x', True)
    """
    events: list[dict[str, Any]] = runtime.current("recent_calls").recorder.events()
    return events
