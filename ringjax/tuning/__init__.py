"""How gradients travel, tried out: bucket sizes and windows in a job's first steps.

What is tried and what wins: trials.py; how all ranks come to the same answer, and
remember it: tuning.py; steps of JAX: step.py. PyTorch's are told by its adapter.
"""
