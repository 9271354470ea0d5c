"""What the ranks of an estimator do, a module for each framework.

Nothing of Spark is imported: a rank is a process of its own.
"""
