"""Implements collectives as JAX primitives: lowering, call order, gradient buckets.

The operations themselves are in `ringjax.collectives`.
"""
