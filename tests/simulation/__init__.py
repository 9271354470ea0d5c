"""Elastic jobs in simulated time: the real rules, thousands of seeds a second."""
