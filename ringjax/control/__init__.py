"""The control plane: ranks find each other, prove the job's secret, and talk in JSON.

Python's standard library only. Nothing here moves tensors (that is `links`), and
nothing decides who belongs to a job (that is `membership`).
"""
