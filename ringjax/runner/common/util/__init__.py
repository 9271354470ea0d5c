"""Horovod's place for small functions of its launcher."""
