"""Horovod's module paths of functions of the launcher; they only import names."""
