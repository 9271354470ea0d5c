"""Collectives as JAX primitives: lowering, order, buckets, JAX's private names.

The operations themselves are in `ringjax.collectives`.
"""
