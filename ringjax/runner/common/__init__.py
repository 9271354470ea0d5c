"""Horovod's module paths of functions for its launcher and its workers."""
