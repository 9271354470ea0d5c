"""What the estimators share, by Horovod's module paths.

`store`: where data and checkpoints are; `backend`: who runs the ranks; `params`,
`estimator`, `saving`: Spark ML's side; `prepared`, `rows`: a DataFrame as Parquet
files, and a rank's rows of them; `loop`: epochs. What runs in ranks imports nothing of
Spark.
"""
