"""Exports the metrics of this rank to programs that use prometheus_client.

`ringrun --metrics` serves the metrics of all ranks, and further metrics. This module is
for jobs without ringrun, and for programs that Prometheus scrapes already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringjax import runtime
from ringjax.monitor import metrics, sample
from ringjax.settings.version import version

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class PrometheusCollector:
    """Collects the metrics of this rank for a registry of `prometheus_client`.

    Metrics have the names and labels of `ringrun --metrics`. A scrape takes some
    microseconds and needs no communication; without scrapes there is no cost. Before
    `ringjax.init` the only metric is the version.

    Example:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> import ringjax
        >>> ringjax.init()
        >>> registry = CollectorRegistry()
        >>> registry.register(ringjax.PrometheusCollector())
        >>> b"ringjax_ranks 1.0" in generate_latest(registry)
        True
    """

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics."""
        from prometheus_client.metrics_core import Metric

        for family in _families():
            # In prometheus_client, only names of samples have the suffix "_total".
            name = family.name.removesuffix("_total")
            metric = Metric(name, family.about, family.kind)
            for suffix, labels, value in family.samples:
                metric.add_sample(family.name + suffix, dict(labels), value)
            yield metric


def _families() -> Iterator[metrics.MetricFamily]:
    yield metrics.build_info(version())
    if not runtime.is_initialized():
        return
    world = runtime.current("PrometheusCollector")
    rank_info, recorder = world.rank_info, world.recorder
    waiting, moving = recorder.busy()
    totals = recorder.totals()
    yield metrics.single_metric(
        "ranks", "gauge", "Ranks of the job now.", rank_info.size
    )
    about = "Which membership of an elastic job it is."
    yield metrics.single_metric("epoch", "gauge", about, world.epoch.number)
    counts = {"calls": recorder.count, "wait_seconds": waiting, "move_seconds": moving}
    counts["faults"] = sum(one["faults"] for one in totals)
    for name, value in counts.items():
        family = metrics.rank_counter(name)
        family.add(value, rank=rank_info.rank)
        yield family
    yield from metrics.collective_metrics(sample.sums(totals))
