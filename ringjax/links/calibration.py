"""What the links of a job are like: measured when it starts, or known from before.

The native cost model compares algorithms by a few constants. Where ranks talk over a
network they are found out here, by ordinary calls over the communicator's own links, in
tens of milliseconds. Rank 0 looks at its clock and decides; all ranks take its numbers,
because all must choose alike. Not for ranks that all share memory: for them the
defaults are good, and a start should cost nothing.
"""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringjax import _native
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.member import Member
from ringjax.errors import PeerLost, StartupError
from ringjax.links import cost_file
from ringjax.links.cost_file import LIMITS, NAMES, Cost

# Together they tell all constants apart: a few long chains, one short one with many
# messages, and one that crosses hosts as seldom as it can.
_ALGORITHMS = ("tree", "ring", "direct", "hierarchical")
_SHORT = 8  # numbers in a message that is all latency
_CALLS = 3  # of one kind in a row
_MOST_TURNS = 4
_SHORT_BUDGET = 0.06  # seconds for all short calls, warm-up apart
_LONG_BUDGET = 0.02  # seconds for one long call
_SMALLEST, _LARGEST = 1 << 18, 1 << 22  # bytes of a long call
_TINY = 1e-30  # a constant that shall not count
_LEAST_SHARE = 0.05  # of latency and work, the one that seems to be nothing
_SWEEPS = 300
_BARRIER = "barrier"


def describe(members: Sequence[Member], hosts: Sequence[int]) -> Any:
    """What identifies the network of a job, None if all ranks share memory.

    The same on all ranks, and the same when the job is started again.
    """
    if len(set(hosts)) == 1 and all(m.hello.get("shm") for m in members):
        return None
    first = [members[list(hosts).index(host)].hello for host in sorted(set(hosts))]
    keys = ("hostname", "machine", "version", "settings")
    return {
        "ranks": list(hosts),
        "shm": [bool(m.hello.get("shm")) for m in members],
        "hosts": [{key: hello.get(key) for key in keys} for hello in first],
        "addresses": [_without_ports(str(hello["addresses"])) for hello in first],
    }


def _without_ports(addresses: str) -> list[str]:
    return sorted({host for host, _ in address.parse(addresses)})


def calibrate(
    communicator: _native.Communicator,
    config: Config,
    network: Any,
    before: Cost | None = None,
) -> tuple[Cost, str]:
    """Finds the constants and sets them; all ranks of the communicator call it.

    Args:
        network: what `describe` says.
        before: what holds already; only rank 0's counts.

    Returns:
        The constants, the same on all ranks, "measured" or "remembered".

    Raises:
        PeerLost: a rank has gone meanwhile.
        StartupError: it took longer than the start timeout.
    """
    # The core's own limit is for calls that may rightly take long; a start may not.
    limit = f"the links could not be measured within {config.start_timeout:g} s"
    guard = threading.Timer(config.start_timeout, communicator.abort, (limit,))
    guard.daemon = True
    guard.start()
    try:
        return _calibrate(_CalibrationProbe(communicator), config, network, before)
    except _native.StatusError as error:
        if error.code == "UNAVAILABLE" and error.rank >= 0:
            raise PeerLost(f"ringjax.init: {error}", error.rank) from error
        raise StartupError(f"ringjax.init: {error}") from error
    finally:
        guard.cancel()
        guard.join()


def _calibrate(
    probe: _CalibrationProbe, config: Config, network: Any, before: Cost | None
) -> tuple[Cost, str]:
    communicator, folder, known = probe.communicator, "", before or None
    # Who has been in the job for long knows constants that newcomers do not: until all
    # have them, all choose by the defaults.
    communicator.set_cost({}, config.algorithm, trial=True)
    if communicator.rank == 0:
        folder = config.cache_folder()
        if config.calibrate == "auto" and known is None:
            known = cost_file.read(folder, network)
    has_file = probe.share([known is not None])[0]
    try:
        if not has_file:
            known = _measure(probe)
    finally:
        communicator.set_cost({}, config.algorithm, trial=True)
    numbers = [known[name] for name in NAMES] if known else [0.0] * len(NAMES)
    cost = dict(zip(NAMES, probe.share(numbers), strict=True))
    communicator.set_cost(cost, config.algorithm)
    if communicator.rank == 0 and not has_file:
        cost_file.write(folder, network, cost)
    return cost, "remembered" if has_file else "measured"


class _CalibrationProbe:
    """Calls of one communicator, and rank 0's clock."""

    def __init__(self, communicator: _native.Communicator) -> None:
        self.communicator = communicator
        self.coefficients = _coefficients(communicator.hosts)

    def share(self, numbers: Iterable[float]) -> list[float]:
        """Rank 0's numbers, on all ranks."""
        values = array.array("d", numbers)
        self._execute("broadcast", values)
        return values.tolist()

    def seconds(self, algorithm: str, values: Any, calls: int) -> float:
        """Of one of so many calls in a row."""
        forced = "" if algorithm == _BARRIER else f"allreduce:{algorithm}"
        self.communicator.set_cost({}, forced, trial=True)
        op = _BARRIER if algorithm == _BARRIER else "allreduce"
        self._execute(_BARRIER)  # all begin together
        start = time.perf_counter()
        for _ in range(calls):
            self._execute(op, *([] if op == _BARRIER else [values]))
        self._execute(_BARRIER)  # a root is done long before the leaves
        return (time.perf_counter() - start) / calls

    def _execute(self, op: str, *values: Any) -> None:
        which = _native.COLLECTIVES[op], _native.REDUCE_OPS["Sum"]
        self.communicator.execute(*which, values, values, name="calibration")


def _coefficients(hosts: Sequence[int]) -> dict[str, dict[str, float]]:
    """How often each constant counts in a time that `seconds` measures, without bytes.

    Each call begins with a barrier, in rounds in which everybody sends a message and
    waits for one; and one more follows the last call.
    """
    where = "remote" if len(set(hosts)) > 1 else "local"
    rounds = (len(hosts) - 1).bit_length() * (_CALLS + 1) / _CALLS
    barrier = {f"{where}_latency": rounds, f"{where}_message": rounds}
    found = {_BARRIER: barrier}
    for name in NAMES:
        alone = dict.fromkeys(NAMES, _TINY) | {name: 1.0}
        for algorithm, value in _native.predict("allreduce", 0, list(hosts), alone):
            if algorithm in _ALGORITHMS:
                row = found.setdefault(algorithm, {})
                row[name] = round(value, 6) + barrier.get(name, 0.0)
    return found


def _measure(probe: _CalibrationProbe) -> Cost | None:
    """The constants, on rank 0; None on the others."""
    times = _short(probe)
    remote = len(set(probe.communicator.hosts)) > 1
    name = "remote_byte" if remote else "local_byte"
    byte = _long(probe, name)
    if probe.communicator.rank != 0:
        return None
    probe.communicator.set_cost({}, trial=True)
    known = probe.communicator.cost | fit(times, probe.coefficients) | {name: byte}
    return {n: _rounded(n, known[n]) for n in NAMES}


def _rounded(name: str, value: float) -> float:
    low, high = LIMITS[name.partition("_")[2]]
    return float(f"{min(max(value, low), high):.4g}")


def _short(probe: _CalibrationProbe) -> dict[str, float]:
    """Seconds of a call that is all latency: of each algorithm and of a barrier."""
    values = array.array("d", [0.0] * _SHORT)
    names = list(probe.coefficients)
    warm = sum(probe.seconds(name, values, 1) for name in names)
    turns = round(_SHORT_BUDGET / (_CALLS * max(warm, 1e-6)))
    turns = int(probe.share([min(max(turns, 1), _MOST_TURNS)])[0])
    rounds = [
        {name: probe.seconds(name, values, _CALLS) for name in names}
        for _ in range(turns)
    ]
    # What else runs on a host only ever adds time.
    return {name: min(times[name] for times in rounds) for name in names}


def _long(probe: _CalibrationProbe, name: str) -> float:
    """Seconds of one more byte, by a ring: only one link of a host carries it."""
    hosts = list(probe.communicator.hosts)
    alone = dict.fromkeys(NAMES, _TINY) | {name: 1.0}
    [crossing] = (
        n for a, n in _native.predict("allreduce", 1 << 20, hosts, alone) if a == "ring"
    )

    def seconds(size: int) -> float:
        values = array.array("f", bytes(size))
        # The first call finds the memory and the connections cold.
        return min(probe.seconds("ring", values, 1) for _ in range(2))

    times = _LONG_BUDGET / max(seconds(_SMALLEST), 1e-6)
    wanted = int(min(max(_SMALLEST * times, _SMALLEST), _LARGEST)) // 16 * 16
    size = int(probe.share([wanted])[0])
    # What does not grow with the bytes is in both, and what a shaper lets pass at once.
    part, whole = seconds(size // 4), seconds(size)
    grown = min(max((whole - part) / 0.75, whole / 2), whole)
    return grown / (crossing * size / (1 << 20))


def fit(
    times: Mapping[str, float], coefficients: Mapping[str, Mapping[str, float]]
) -> Cost:
    """The constants by which the cost model comes closest to what was measured.

    A call takes the sum of its coefficients times the constants. These are the ones,
    none negative, with the least squares of the relative errors. What nothing depends
    on is left out.

    Args:
        times: seconds, by algorithm.
        coefficients: by algorithm, how often each constant counts.
    """
    used = [n for n in NAMES if any(row.get(n, 0) > 0 for row in coefficients.values())]
    rows = [
        [row.get(n, 0.0) / times[a] for n in used] for a, row in coefficients.items()
    ]
    cost = dict(zip(used, _least_squares(rows), strict=True))
    for where in ("local", "remote"):
        pair = f"{where}_latency", f"{where}_message"
        most = max(cost.get(name, 0.0) for name in pair)
        if most > 0:  # else nothing depends on them
            cost |= {n: max(cost.get(n, 0.0), _LEAST_SHARE * most) for n in pair}
    return {name: value for name, value in cost.items() if value > 0}


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """What is not negative and makes all `rows` times it come closest to 1.

    One unknown after the other is set to its best value, again and again.
    """
    unknowns = range(len(rows[0]))
    products = [[sum(r[i] * r[j] for r in rows) for j in unknowns] for i in unknowns]
    sums = [sum(r[i] for r in rows) for i in unknowns]
    values = [0.0 for _ in unknowns]
    for _ in range(_SWEEPS):
        for i in unknowns:
            rest = sum(products[i][j] * values[j] for j in unknowns if j != i)
            values[i] = max(0.0, (sums[i] - rest) / products[i][i])
    return values
