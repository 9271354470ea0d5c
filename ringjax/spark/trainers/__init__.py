"""Training and prediction in the ranks of an estimator, a module for each framework.

A rank is a process of its own and imports nothing of Spark.
"""
