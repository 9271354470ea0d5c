"""The control plane: ranks find each other, authenticate, and exchange JSON messages.

The package needs only Python's standard library and NumPy. It moves no tensors (see
`links`) and does not decide who belongs to a job (see `membership`).
"""
