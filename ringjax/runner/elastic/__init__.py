"""Horovod's places for what tells workers about hosts; they only hand names on."""
