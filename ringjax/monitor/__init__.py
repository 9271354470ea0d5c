"""Aggregates samples of all ranks while a job runs, and formats them for people.

Each rank sends totals and its last waits (`sample`). The `aggregator` combines the
samples of all ranks. `report`, `metrics` and ringjax.top show the result. The process
that aggregates is ringrun (run/monitor/), or the first rank in a job without ringrun
(world/reporter.py). Only `sockets` does I/O, and all modules need only the standard
library.
"""
