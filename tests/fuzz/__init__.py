"""Damaged inputs for all code that reads other processes' bytes."""
