"""Measures the constants of the cost model at the start, or reads them from a cache.

The native cost model predicts the time of each algorithm from a few constants, such as
the latency of a link. If ranks communicate over a network, this module measures the
constants by ordinary calls on the links of the communicator, within tens of
milliseconds. All ranks use the constants that rank 0 has measured, because all ranks
must choose the same algorithms. If all ranks share memory, nothing is measured, because
the default constants are good, and the start should be fast.
"""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ringjax import _native
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.member import JsonObject, Member
from ringjax.errors import PeerLost, StartupError
from ringjax.links import cost_cache
from ringjax.links.cost_cache import LIMITS, NAMES, Cost, Network

# The algorithms to measure. Their times together determine all constants: some have
# long chains of messages, some a short chain of many messages, and one crosses hosts
# rarely.
_ALGORITHMS = ("tree", "ring", "direct", "hierarchical")
# With more ranks, algorithms whose time grows with the logarithm of the ranks.
_FEW = 32
_ALGORITHMS_OF_MANY = ("tree", "halving", "hierarchical")
_SHORT = 8  # elements of a message that is so short that its time is only latency
_CALLS = 3  # calls that are timed together
_MAX_ROUNDS = 4
_SHORT_BUDGET = 0.06  # seconds for all short calls without the warm-up
_LONG_BUDGET = 0.02  # seconds for one long call
_MIN_LONG, _MAX_LONG = 1 << 18, 1 << 22  # bytes of a long call
_TINY = 1e-30  # the value of a constant that must have no influence on a prediction
_MIN_SHARE = 0.05  # a link's latency and message constants differ by at most 1 / this
_SWEEPS = 300
_BARRIER = "barrier"
Array: TypeAlias = "array.array[float]"


def describe_network(members: Sequence[Member], hello: JsonObject) -> Network | None:
    """Describes the network of a job. Returns None if no rank uses a network.

    The description is equal again when the job is restarted. `members` are in rank
    order, and `hello` describes this rank.
    """
    # The only rank of an elastic job sends nothing, also without shared memory.
    if len(members) == 1 or all(m.host == 0 and m.shm for m in members):
        return None
    keys = ("machine", "version", "settings", "fabric")
    return {
        "ranks": [m.host for m in members],
        "shm": [m.shm for m in members],
        "hosts": [m.hostname for m in members],
        "addresses": _without_ports(str(hello["addresses"])),
        **{key: hello.get(key) for key in keys},
    }


def _without_ports(addresses: str) -> list[str]:
    return sorted({host for host, _ in address.parse(addresses)})


def calibrate(
    communicator: _native.Communicator,
    config: Config,
    network: Network,
    before: Cost | None = None,
) -> tuple[Cost, str]:
    """Measures or reads the constants of the cost model, and sets them on all ranks.

    All ranks of the world must call this function. Members of the previous epoch pass
    the constants of that epoch as `before`; only the constants of rank 0 are used.

    Returns:
        The constants, equal on all ranks, and "measured" or "remembered".

    Raises:
        PeerLost: a rank was lost during the measurement.
        StartupError: the measurement took longer than the start timeout.
    """
    # The timeout of the native core is for training, where a rank may be late for a
    # good reason. The start has a shorter timeout.
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
    probe: _CalibrationProbe, config: Config, network: Network, before: Cost | None
) -> tuple[Cost, str]:
    communicator, folder, known = probe.communicator, "", before or None
    # Members of the previous epoch have constants that newcomers do not have. Until all
    # ranks have the same constants, all choose algorithms by the default constants.
    communicator.set_cost({}, config.algorithm, trial=True)
    if communicator.rank == 0:
        folder = config.cache_folder()
        if config.calibrate == "auto" and known is None:
            known = cost_cache.read(folder, network)
    has_file = probe.broadcast([known is not None])[0]
    try:
        if not has_file:
            known = _measure(probe)
    finally:
        communicator.set_cost({}, config.algorithm, trial=True)
    numbers = [known[name] for name in NAMES] if known else [0.0] * len(NAMES)
    cost = dict(zip(NAMES, probe.broadcast(numbers), strict=True))
    communicator.set_cost(cost, config.algorithm)
    if communicator.rank == 0 and not has_file:
        cost_cache.write(folder, network, cost)
    return cost, "remembered" if has_file else "measured"


class _CalibrationProbe:
    """Runs calls on one communicator and measures their time."""

    def __init__(self, communicator: _native.Communicator) -> None:
        self.communicator = communicator
        self.coefficients = _coefficients(communicator.hosts)

    def broadcast(self, numbers: Iterable[float]) -> list[float]:
        """Returns rank 0's `numbers` on all ranks, which must all call `broadcast`."""
        values = array.array("d", numbers)
        self._execute("broadcast", values)
        return values.tolist()

    def time_call(self, algorithm: str, values: Array, calls: int) -> float:
        """Runs `calls` calls in a row, and returns the seconds of one call.

        Each call is an allreduce of `values` by `algorithm`, or, if `algorithm` is
        "barrier", a barrier.
        """
        forced = "" if algorithm == _BARRIER else f"allreduce:{algorithm}"
        self.communicator.set_cost({}, forced, trial=True)
        op = _BARRIER if algorithm == _BARRIER else "allreduce"
        self._execute(_BARRIER)  # all ranks begin together
        start = time.perf_counter()
        for _ in range(calls):
            self._execute(op, *([] if op == _BARRIER else [values]))
        # Wait for all ranks, because the root of a tree returns long before the leaves.
        self._execute(_BARRIER)
        return (time.perf_counter() - start) / calls

    def _execute(self, op: str, *values: Array) -> None:
        code, reduce_op = _native.COLLECTIVES[op], _native.REDUCE_OPS["Sum"]
        self.communicator.execute(code, reduce_op, values, values, name="calibration")


def _coefficients(hosts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Returns how often the time of a short call contains each constant.

    The result is by algorithm of `time_call` and by constant. Each call begins with a
    barrier. In each round of a barrier, every rank sends a message and waits for a
    message. One more barrier follows the last call.
    """
    where = "remote" if len(set(hosts)) > 1 else "local"
    rounds = (len(hosts) - 1).bit_length() * (_CALLS + 1) / _CALLS
    barrier = {f"{where}_latency": rounds, f"{where}_message": rounds}
    found = {_BARRIER: barrier}
    measured = _ALGORITHMS if len(hosts) <= _FEW else _ALGORITHMS_OF_MANY
    for name in NAMES:
        alone = dict.fromkeys(NAMES, _TINY) | {name: 1.0}
        for algorithm, value in _native.predict("allreduce", 0, list(hosts), alone):
            if algorithm in measured:
                row = found.setdefault(algorithm, {})
                row[name] = round(value, 6) + barrier.get(name, 0.0)
    return found


def _measure(probe: _CalibrationProbe) -> Cost | None:
    """Measures the constants. Returns None on all ranks except rank 0."""
    times = _time_short_calls(probe)
    remote = len(set(probe.communicator.hosts)) > 1
    name = "remote_byte" if remote else "local_byte"
    byte = _time_byte(probe, name)
    if probe.communicator.rank != 0:
        return None
    probe.communicator.set_cost({}, trial=True)
    known = probe.communicator.cost | fit(times, probe.coefficients) | {name: byte}
    return {n: _rounded(n, known[n]) for n in NAMES}


def _rounded(name: str, value: float) -> float:
    low, high = LIMITS[name.partition("_")[2]]
    return float(f"{min(max(value, low), high):.4g}")


def _time_short_calls(probe: _CalibrationProbe) -> dict[str, float]:
    """Returns the seconds of a short call of each algorithm, and of a barrier."""
    values = array.array("d", [0.0] * _SHORT)
    names = list(probe.coefficients)
    warm = sum(probe.time_call(name, values, 1) for name in names)
    count = round(_SHORT_BUDGET / (_CALLS * max(warm, 1e-6)))
    count = int(probe.broadcast([min(max(count, 1), _MAX_ROUNDS)])[0])
    rounds = [
        {name: probe.time_call(name, values, _CALLS) for name in names}
        for _ in range(count)
    ]
    # Use the minimum, because other programs on a host can only make a call slower.
    return {name: min(times[name] for times in rounds) for name in names}


def _time_byte(probe: _CalibrationProbe, name: str) -> float:
    """Measures the seconds per byte of an allreduce, with one link of each host."""
    hosts = list(probe.communicator.hosts)
    chosen = "ring" if len(hosts) <= _FEW else "halving"
    alone = dict.fromkeys(NAMES, _TINY) | {name: 1.0}
    [crossing] = (
        n for a, n in _native.predict("allreduce", 1 << 20, hosts, alone) if a == chosen
    )

    def seconds(size: int) -> float:
        values = array.array("f", bytes(size))
        # Use the faster of two calls. The first is slower, because its memory is not in
        # the caches, and its connections have been idle.
        return min(probe.time_call(chosen, values, 1) for _ in range(2))

    times = _LONG_BUDGET / max(seconds(_MIN_LONG), 1e-6)
    wanted = int(min(max(_MIN_LONG * times, _MIN_LONG), _MAX_LONG)) // 16 * 16
    size = int(probe.broadcast([wanted])[0])
    # Use the difference between the times of two sizes. Both times contain the latency,
    # and the burst that a traffic shaper passes at full speed; the difference does not.
    part, whole = seconds(size // 4), seconds(size)
    grown = min(max((whole - part) / 0.75, whole / 2), whole)
    return grown / (crossing * size / (1 << 20))


def fit(
    times: Mapping[str, float], coefficients: Mapping[str, Mapping[str, float]]
) -> Cost:
    """Finds the constants with which the cost model fits the measured times best.

    The cost model predicts the time of a call as the sum of coefficient times constant.
    The result has no negative constant and minimizes the sum of squared relative
    errors. The result omits constants on which no call depends.
    """
    used = [n for n in NAMES if any(row.get(n, 0) > 0 for row in coefficients.values())]
    rows = [
        [row.get(n, 0.0) / times[a] for n in used] for a, row in coefficients.items()
    ]
    cost = dict(zip(used, _least_squares(rows), strict=True))
    for where in ("local", "remote"):
        pair = f"{where}_latency", f"{where}_message"
        most = max(cost.get(name, 0.0) for name in pair)
        if most > 0:  # otherwise no call depends on these two constants
            cost |= {n: max(cost.get(n, 0.0), _MIN_SHARE * most) for n in pair}
    return {name: value for name, value in cost.items() if value > 0}


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Finds x >= 0 that minimizes |`rows` * x - 1|^2, by coordinate descent.

    Each sweep sets every element of x, one after another, to its best value.
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
