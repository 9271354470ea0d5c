"""Horovod's helper functions, which `ringjax.common` and the adapters use."""
