"""What a job does while it runs, from what its ranks tell: a report, metrics, a view.

Each rank tells sums and its last waits (`sample`); `aggregator` puts those of all ranks
together; `report`, `metrics` and ringjax.top show it. Whoever gathers gives all of them
the same aggregator: ringrun (run/monitor/), and where there is none, the first rank
(world/reporter.py). Standard library only; nothing here does I/O but `sockets`.
"""
