"""Aggregates samples of all ranks while a job runs, and formats the result for people.

Each rank sends totals and its last waits (`sample`). The `aggregator` combines the
samples of all ranks. `report`, `metrics` and ringjax.top show the result. ringrun
aggregates (run/monitor/); in a job without ringrun, rank 0 does (world/reporter.py).
Only `sockets` does I/O, and all modules need only the standard library.
"""
