"""A Spark session on this machine with settings for a quick start."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MARKS = [
    pytest.mark.timeout(180),
    # Warnings of Spark and of the packages that it uses.
    pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
WITH_JAVA = [
    *MARKS,
    pytest.mark.skipif(
        shutil.which("java") is None, reason="Spark needs a Java runtime"
    ),
]
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@contextmanager
def local_spark(master: str, *, connect: bool = False, **more: str) -> Iterator[Any]:
    """Starts a session, which is stopped at the end.

    Args:
        master: `local[2]` or `local-cluster[2,2,512]`.
        connect: whether to start a server of Spark Connect, and to connect to it.
        more: settings of Spark.
    """
    from pyspark.sql import SparkSession

    patch = pytest.MonkeyPatch()
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    patch.setenv("SPARK_LOCAL_HOSTNAME", "localhost")
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    if connect:
        session = builder.remote(master).getOrCreate()
    else:
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": JVM,
            "spark.executor.extraJavaOptions": JVM,
            **more,
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.master(master).getOrCreate()
    try:
        yield session
    finally:
        session.stop()
        patch.undo()
