"""Returns statistics of this rank's calls: totals since `init`, and the last calls.

The native core (`xla_ext/engine/recorder/`) records three times of each call, on the
clock of its process: when this rank entered the call, when all ranks had entered the
call, and when the call was done. Until all ranks have entered, the rank waits for other
ranks; after that, data move.
"""

from __future__ import annotations

from typing import Any

from ringjax import runtime
from ringjax.world.communicator_ids import PRIVATE

_BUCKET = ("set", "lane", "named", "op", "name", "bytes")


def stats(*, buckets: bool = False) -> dict[str, Any]:
    """Returns totals of all calls of this rank since `init`, as a nested dict.

    The function takes some microseconds and needs no communication. To compare ranks,
    gather the results of all ranks.

    Args:
        buckets: whether to add totals of the last calls by name and size, which takes a
            millisecond.

    Returns:
        The current ``rank``, ``size`` and ``epoch``; ``calls``, the number of calls in
        all lanes; ``transports``, the number of this rank's links in the world's
        compiled lane by transport, "shm", "tcp", or the provider of ``RINGJAX_FABRIC``
        such as "efa"; and ``process_sets``, by id (0 is the world), then by lane, then
        by collective. The lanes are ``compiled`` (in jit), ``named``
        (`ringjax.eager`, PyTorch, TensorFlow, Keras), and ``jax`` if ringjax carries
        JAX's own collectives, by JAX's names (see `recent_calls`). Each collective has:

        * ``calls``, ``failures``; ``bytes`` of this rank's tensors
        * ``faults``: exchanges of exact sums that wrong bits of this rank have spoiled,
          or of some rank and it is not known which. An exchange is made again once.
          A machine with faults may be about to fail
        * ``wait_seconds``: from the call (of a named operation, from its submission)
          until all ranks had entered the call; ``most_waited`` is the longest wait
        * ``move_seconds``: from the end of the wait until the result was available; for
          CUDA devices until the operation was enqueued
        * ``device_seconds``: time on the streams of CUDA devices, including a short
          delay until the native core detects the end
        * ``wait_histogram``, ``move_histogram``: counts of calls by time. The first
          bucket ends at 1 µs, each further bucket at twice the time of the bucket
          before, and the last bucket has no end

        If a process has several CUDA devices, calls and times are from the first
        device, and ``bytes`` are the bytes of all devices.

        In the compiled lane, each collective also has ``sent_bytes`` and ``algorithms``
        of the current epoch, and the lane has ``exposed_seconds``: the time that
        programs have waited at the end of a step for overlapped calls.

        With `buckets`, ``buckets`` is a list of totals over the last 1,024 calls,
        grouped by ``set``, ``lane``, ``op``, ``name`` and ``bytes`` of one call. Each
        group has ``calls``, ``wait_seconds`` and ``move_seconds``. For example, each
        bucket of overlapped gradients is one group, and so is each named tensor.

    Raises:
        NotInitialized: before `init`, unless ringjax carries JAX's own collectives.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> x = ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
        >>> seen = ringjax.stats()["process_sets"][0]["named"]["allreduce"]
        >>> seen["bytes"] >= 16, seen["failures"], len(seen["wait_histogram"])
        (True, 0, 26)
    """
    world = runtime.observed("stats")
    totals = world.recorder.totals()
    sets: dict[int, dict[str, Any]] = {}
    for collective in totals:
        lane = _lane(sets, collective.pop("set"), collective.pop("lane"))
        lane[collective.pop("op")] = collective
    for number, communicator in world.communicators.items():
        if number >= PRIVATE:
            continue
        for op, more in communicator.stats().items():
            compiled = _lane(sets, number, "compiled")
            if op == "overlap":
                compiled["exposed_seconds"] = more["exposed_seconds"]
            elif op in compiled:
                compiled[op] |= {k: more[k] for k in ("sent_bytes", "algorithms")}
    transports: dict[str, int] = {}
    if 0 in world.communicators:
        transports = world.communicators[0].stats()["transports"]
    found = {
        "rank": world.rank_info.rank,
        "size": world.rank_info.size,
        "epoch": world.epoch.number,
        "calls": sum(collective["calls"] for collective in totals),
        "process_sets": sets,
        "transports": transports,
    }
    if buckets:
        found["buckets"] = _group_by_bucket(world.recorder.events())
    return found


def _group_by_bucket(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in calls:
        key = {name: call[name] for name in _BUCKET}
        empty = {"calls": 0, "wait_seconds": 0.0, "move_seconds": 0.0}
        sums = found.setdefault(tuple(key.values()), key | empty)
        agreed = call["done"] if call["agreed"] is None else call["agreed"]
        sums["calls"] += 1
        sums["wait_seconds"] += agreed - call["entered"]
        sums["move_seconds"] += call["done"] - agreed
    return list(found.values())


def _lane(sets: dict[int, dict[str, Any]], number: int, lane: str) -> dict[str, Any]:
    lanes = sets.setdefault(number, {"compiled": {}, "named": {}})
    found: dict[str, Any] = lanes.setdefault(lane, {})
    return found


def recent_calls() -> list[dict[str, Any]]:
    """Returns the last calls of this rank, at most 1,024, oldest first.

    When the job ends with an error, each rank also writes these calls to a file in the
    folder `RINGJAX_RECORD_DIR`, and prints the name of the file.

    Returns:
        For each call: ``op``, ``name``, ``lane``, ``named`` (whether it ran in the
        named lane), ``set`` (the id of the process set), ``epoch``, ``seq`` (the
        sequence number in this lane of the set, equal on all ranks), ``bytes``,
        ``algorithm`` (how the data moved: "inline", "tiles" or "piggyback" through
        memory that the ranks share, or else the name of a schedule), ``device``,
        ``ok``, and the times ``entered``, ``agreed`` (all ranks had entered) and
        ``done`` in seconds of `time.monotonic`. ``agreed`` is None if some rank never
        entered the call.

        In the lane ``jax``, ``op`` is JAX's name: psum, pmax, pmin, product,
        all_gather, psum_scatter, ppermute, all_to_all. ``name`` lists the processes,
        and ``set`` is 0 if these are all processes of the job. The processes of a
        ppermute or an all_to_all do not agree first: ``seq`` is 0, and all of their
        time counts as moving data. An all_to_all of n processes is n - 1 calls.

    Raises:
        NotInitialized: before `init`, unless ringjax carries JAX's own collectives.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> x = ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
        >>> last = ringjax.recent_calls()[-1]
        >>> last["name"], last["entered"] <= last["agreed"] <= last["done"]
        ('x', True)
    """
    events: list[dict[str, Any]] = runtime.observed("recent_calls").recorder.events()
    return events
