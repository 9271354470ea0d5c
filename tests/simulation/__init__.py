"""Elastic jobs in simulated time, with the real rules, thousands of seeds a second."""
