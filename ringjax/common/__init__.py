"""Horovod's module paths of shared classes and functions; they only import them."""
