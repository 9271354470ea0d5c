"""Horovod's module paths of helper functions of its launcher."""
