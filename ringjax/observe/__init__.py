"""Statistics of this rank for programs: numbers, Prometheus metrics, scalars."""
