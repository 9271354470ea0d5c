"""Horovod's places for what the launcher finds out; they only hand names on."""
