"""Links: connects each pair of ranks in the fastest way, and measures the cost."""
