"""A collective as a JAX primitive: lowering, order, buckets, JAX's private names.

Knows no operation: those are in `ringjax.collectives`.
"""
