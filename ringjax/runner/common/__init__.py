"""Modules at the paths of Horovod's package `horovod.runner.common`."""
