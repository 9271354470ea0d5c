"""Autotuning: tries bucket sizes and overlap windows in the first steps of a job.

`trials.py` has the settings and chooses the fastest. `tuning.py` makes all ranks choose
the same one and remembers it. `step.py` tunes steps of JAX. The adapter of PyTorch uses
`tuning.py` directly.
"""
