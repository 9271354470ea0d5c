"""Horovod's names for settings of Spark in elastic jobs, as (name, value) pairs.

In today's Spark, excludeOnFailure has replaced the blacklist of executors and nodes.

Example:
    >>> SPARK_CONF_ALWAYS_RESTART_FAILED_TASK
    ('spark.task.maxFailures', '2147483647')
"""

_EXCLUDE = "spark.excludeOnFailure"
SPARK_CONF_MAX_INT = "2147483647"
SPARK_CONF_MAX_INT_MINUS_ONE = "2147483646"

# An elastic job continues while Spark repeats a task, so no limit is needed.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")

# These settings decide whether other tasks of a stage may use an executor on which a
# task has failed, or a node on which executors have failed.
_IN_STAGE = f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor"
SPARK_CONF_REUSE_FAILED_EXECUTOR = (_IN_STAGE, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (_IN_STAGE, "1")
_NODE_IN_STAGE = f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode"
SPARK_CONF_REUSE_FAILING_NODE = (_NODE_IN_STAGE, SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (_NODE_IN_STAGE, "1")

# These settings decide whether the failed task may use the executor or node again.
_FOR_TASK = f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor"
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (_FOR_TASK, SPARK_CONF_MAX_INT)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (_FOR_TASK, "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (_FOR_TASK, "1")
_NODE_FOR_TASK = f"{_EXCLUDE}.task.maxTaskAttemptsPerNode"
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (
    _NODE_FOR_TASK,
    SPARK_CONF_MAX_INT_MINUS_ONE,
)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (_NODE_FOR_TASK, "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (_NODE_FOR_TASK, "1")

# These settings decide whether the whole application may use the executor or node
# again.
_IN_APP = f"{_EXCLUDE}.application.maxFailedTasksPerExecutor"
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (_IN_APP, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (_IN_APP, "1")
_NODE_IN_APP = f"{_EXCLUDE}.application.maxFailedExecutorsPerNode"
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (_NODE_IN_APP, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (_NODE_IN_APP, "1")

# Spark's default values of these settings.
SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    f"{_EXCLUDE}.enabled": "false",
    _IN_STAGE: "2",
    _NODE_IN_STAGE: "2",
    _FOR_TASK: "1",
    _NODE_FOR_TASK: "2",
    _IN_APP: "2",
    _NODE_IN_APP: "2",
}
