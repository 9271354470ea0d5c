"""Provides functions under Horovod's module path."""

from ringjax.spark.common.columns import _get_col_info as _get_col_info
from ringjax.spark.common.columns import _get_metadata as _get_metadata
from ringjax.spark.common.columns import (
    check_shape_compatibility as check_shape_compatibility,
)
from ringjax.spark.common.columns import (
    get_spark_df_output_schema as get_spark_df_output_schema,
)
from ringjax.spark.common.columns import to_list as to_list
from ringjax.spark.common.store import is_databricks as is_databricks
from ringjax.spark.common.training_data import _train_val_split as _train_val_split
from ringjax.spark.common.training_data import _training_cache as _training_cache
from ringjax.spark.common.training_data import check_validation as check_validation
from ringjax.spark.common.training_data import (
    clear_training_cache as clear_training_cache,
)
from ringjax.spark.common.training_data import (
    get_dataset_properties as get_dataset_properties,
)
from ringjax.spark.common.training_data import (
    get_simple_meta_from_parquet as get_simple_meta_from_parquet,
)
from ringjax.spark.common.training_data import prepare_data as prepare_data
from ringjax.spark.task import host_hash as host_hash
