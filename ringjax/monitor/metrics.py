"""Formats the statistics of a job as metrics, by the conventions of Prometheus.

Labels have few values, to keep the number of time series small: collectives, three
lanes, ranks, and at most 32 process sets ("other" combines all further process sets).
run/monitor/ serves the metrics of a job, and observe/ the metrics of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from ringjax.monitor.aggregator import OTHER_SETS, Aggregator
from ringjax.monitor.job_time import PROGRESS
from ringjax.monitor.sample import BUCKETS, CollectiveKey, CollectiveSums
from ringjax.monitor.view import View

Labels = Mapping[str, str]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAIR = '{}="{}"'
# Upper ends of the histograms' buckets in seconds: 1 µs, 2 µs, 4 µs, and so on.
_ENDS = (*(2**bucket * 1e-6 for bucket in range(BUCKETS - 1)), math.inf)


@dataclass(slots=True)
class MetricFamily:
    """All samples of one metric.

    Attributes:
        about: the help text of the metric.
        samples: for each sample, the suffix of its name, its labels and its value.
    """

    name: str
    kind: str
    about: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float, **labels: object) -> None:
        """Adds a sample whose name has no suffix."""
        texts = {name: str(label) for name, label in labels.items()}
        self.samples.append(("", texts, value))


def format_metrics(families: Iterable[MetricFamily]) -> str:
    r"""Formats metrics as Prometheus's text format.

    Example:
        >>> family = MetricFamily("ringjax_ranks", "gauge", "Ranks of the job.")
        >>> family.add(4)
        >>> print(format_metrics([family]), end="")
        # HELP ringjax_ranks Ranks of the job.
        # TYPE ringjax_ranks gauge
        ringjax_ranks 4
    """
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {family.about}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples:
            pairs = ",".join(_PAIR.format(k, _escape(v)) for k, v in labels.items())
            name = f"{family.name}{suffix}" + (f"{{{pairs}}}" if pairs else "")
            lines.append(f"{name} {format_number(value)}")
    return "\n".join([*lines, ""])


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def format_number(value: float) -> str:
    """Formats a number for Prometheus with all its digits.

    Example:
        >>> format_number(3), format_number(0.25), format_number(math.inf)
        ('3', '0.25', '+Inf')
    """
    if value == math.inf:
        return "+Inf"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))


def single_metric(
    name: str, kind: str, about: str, value: float, **labels: object
) -> MetricFamily:
    """Returns the metric ``ringjax_`` + `name` with one sample."""
    family = MetricFamily(f"ringjax_{name}", kind, about)
    family.add(value, **labels)
    return family


def build_info(version: str) -> MetricFamily:
    about = "1; the version of ringjax."
    return single_metric("build_info", "gauge", about, 1, version=version)


def collective_metrics(
    sums: Mapping[CollectiveKey, CollectiveSums],
) -> Iterator[MetricFamily]:
    """Yields the metrics that have the labels collective, lane and process set."""
    labels_of = {key: _labels(key) for key in sorted(sums)}
    for name, meaning in (
        ("wait", "from a call until all ranks had come"),
        ("move", "from then on until the result was there"),
    ):
        family = MetricFamily(
            f"ringjax_collective_{name}_seconds", "histogram", f"Time {meaning}."
        )
        for key, labels in labels_of.items():
            seconds = getattr(sums[key], f"{name}_seconds")
            _add_histogram(family, labels, getattr(sums[key], name), seconds)
        yield family
    for name, about in (
        ("bytes", "Bytes of the ranks' tensors in collectives."),
        ("failures", "Collectives that failed."),
    ):
        family = MetricFamily(f"ringjax_collective_{name}_total", "counter", about)
        for key, labels in labels_of.items():
            family.add(getattr(sums[key], name), **labels)
        yield family


def _labels(key: CollectiveKey) -> dict[str, str]:
    op, lane, process_set = key
    return {
        "op": op,
        "lane": lane,
        "process_set": "other" if process_set == OTHER_SETS else str(process_set),
    }


def _add_histogram(
    family: MetricFamily, labels: Labels, counts: Iterable[int], seconds: float
) -> None:
    total = 0
    for end, count in zip(_ENDS, counts, strict=True):
        total += count
        family.samples.append(("_bucket", {**labels, "le": format_number(end)}, total))
    family.samples.append(("_sum", labels, seconds))
    family.samples.append(("_count", labels, total))


def _spare_metric(spares: list[tuple[int, str, bool]] | None) -> MetricFamily:
    """Counts the spares of a job by their state. Without `spares` has no samples."""
    about = "Processes that sleep until a rank is lost, or start to."
    family = MetricFamily("ringjax_spares", "gauge", about)
    if spares is not None:
        asleep = sum(ready for _, _, ready in spares)
        family.add(asleep, state="asleep")
        family.add(len(spares) - asleep, state="starting")
    return family


def job_metrics(aggregator: Aggregator, view: View, version: str) -> list[MetricFamily]:
    """Returns all metrics of a job: totals from `aggregator`, gauges from `view`."""
    epoch = max(aggregator.epoch, 0)
    single: tuple[tuple[str, str, str, float], ...] = (
        ("ranks", "gauge", "Ranks of the job now.", aggregator.size),
        ("hosts", "gauge", "Hosts that have ranks now.", view.hosts),
        ("epoch", "gauge", "Which membership of an elastic job it is.", epoch),
        ("joins_total", "counter", "Processes that joined later.", aggregator.joins),
        ("losses_total", "counter", "Processes that were lost.", aggregator.losses),
        ("step_seconds", "gauge", "From step to step, by calls.", view.step),
        (
            "bus_bandwidth_bytes_per_second",
            "gauge",
            "Over the busiest link while data moves, of the slowest rank.",
            view.busbw,
        ),
    )
    return [
        build_info(version),
        *(single_metric(*metric) for metric in single),
        _spare_metric(aggregator.spares),
        *_rank_metrics(aggregator, view),
        *collective_metrics(aggregator.sums),
    ]


def time_metrics(shares: Mapping[str, float]) -> list[MetricFamily]:
    """Returns the metrics of where the job's time has gone; see `JobTime.shares`."""
    goodput, lost = (
        MetricFamily(f"ringjax_{name}_ratio", "gauge", about)
        for name, about in (
            ("goodput", "Share of the job's time that made progress."),
            ("lost_time", "Share of the job's time that made no progress, by part."),
        )
    )
    for part, share in shares.items():
        if part == PROGRESS:
            goodput.add(share)
        else:
            lost.add(share, part=part)
    return [goodput, lost]


def _rank_metrics(aggregator: Aggregator, view: View) -> Iterator[MetricFamily]:
    info = MetricFamily("ringjax_rank_info", "gauge", "1; the host of a rank.")
    for row in view.rows:
        info.add(1, rank=row.rank, host=row.host)
    yield info
    for name, about, attribute in (
        ("lateness_seconds", "How late a rank usually is, if it is last.", "late_by"),
        ("memory_bytes", "Memory of a rank's process.", "memory"),
        ("silence_seconds", "Time since a rank told something.", "silent"),
    ):
        family = MetricFamily(f"ringjax_rank_{name}", "gauge", about)
        for row in view.rows:
            family.add(getattr(row, attribute), rank=row.rank)
        yield family
    known = sorted(rank for rank in aggregator.ranks if rank < aggregator.size)
    for name, (_, attribute) in _RANK_COUNTERS.items():
        family = rank_counter(name)
        for rank in known:
            family.add(attrgetter(attribute)(aggregator.ranks[rank]), rank=rank)
        yield family


# Maps the name of each counter to its help text and the attribute of RankTotals.
_RANK_COUNTERS = {
    "calls": ("Calls of a rank.", "totals.calls"),
    "wait_seconds": ("Time in which some call waited for ranks.", "totals.waiting"),
    "move_seconds": ("Time in which some call moved data.", "totals.moving"),
    "exposed_seconds": ("Time that overlapping did not hide.", "totals.exposed"),
    "faults": ("Calls that wrong bits of a rank have spoiled.", "totals.faults"),
    "last": ("Calls in which a rank came last, of those looked at.", "last"),
    "delay_seconds": ("Time that others waited for a rank in those.", "lost"),
}


def rank_counter(name: str) -> MetricFamily:
    """Returns a counter of `_RANK_COUNTERS` as a MetricFamily without samples."""
    about = _RANK_COUNTERS[name][0]
    return MetricFamily(f"ringjax_rank_{name}_total", "counter", about)
