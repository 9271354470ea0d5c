"""Statistics of this rank for programs: dicts, Prometheus metrics, scalars."""
