"""The modules that all estimators share, under Horovod's module paths.

`store` has the paths of data and checkpoints, and `backend` runs the ranks. `params`,
`estimator` and `params_io` implement the interface of Spark ML. `training_data` writes
a DataFrame as Parquet files, `parquet_rows` reads a rank's rows of these files, and
`training_loop` runs epochs. The modules that run in ranks import nothing of Spark.
"""
