"""Horovod's place for what its launcher and its workers share."""
