"""Horovod's places for what its frameworks share; they only hand names on."""
