"""Horovod's module paths of elastic jobs; they only import names."""
