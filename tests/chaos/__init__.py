"""Chaos tests: faults hit workers at random, and a checker verifies the training."""
