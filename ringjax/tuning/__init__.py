"""Autotuning: tries bucket sizes and overlap windows in the first steps of a job.

`trials.py` has the settings and chooses the fastest setting. `tuning.py` makes all
ranks choose the same setting and stores it. `step.py` tunes steps of JAX. The adapter
of PyTorch uses `tuning.py` directly.
"""
