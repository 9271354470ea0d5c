"""Bytes between two ranks: each pair connected in the best way, and what that costs."""
