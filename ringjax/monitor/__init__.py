"""Combines the statistics of all ranks while a job runs, and formats them for people.

Each rank sends a `sample`: totals, and the waiting times of its last calls. The
`aggregator` combines the samples of all ranks. `report`, `metrics` and ringjax.top show
the result. The aggregator runs in ringrun (run/monitor/), or, in a job without ringrun,
in rank 0 (world/reporter.py). Only `sockets` and `trainjob_status` do I/O, and all
modules need only the standard library.
"""
