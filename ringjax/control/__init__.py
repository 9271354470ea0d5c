"""The control plane: ranks find each other, authenticate, and exchange JSON messages.

The package needs only Python's standard library and NumPy. The package moves no tensors
(see `links`) and does not decide which workers belong to a job (see `membership`).
"""
