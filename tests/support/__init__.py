"""Helpers of the tests: jobs of ranks, checks for leaks, stubs, hostile peers."""
