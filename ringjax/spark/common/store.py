"""The stores in which estimators keep their intermediate data and their checkpoints.

A store is a folder that the driver and all executors can open under one name. pyarrow
must support its filesystem, or fsspec if fsspec is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from ringjax.run import environ


def is_databricks() -> bool:
    """Returns whether this process runs in Databricks' runtime."""
    return "DATABRICKS_RUNTIME_VERSION" in environ.inherited()


class Store:
    """The base of all stores; `Store.create` chooses the class."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> FilesystemStore:
        """Makes the store for a path or URL.

        Example:
            >>> Store.create("/tmp/runs").get_run_path("a")
            'file:///tmp/runs/runs/a'
        """
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        if is_databricks() and DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)


class FilesystemStore(Store):
    """A store in a folder of any filesystem that pyarrow or fsspec supports.

    Args:
        prefix_path: a path of this machine, or a URL such as ``s3://bucket/folder``.
        train_path, val_path, test_path, runs_path: folders for training, validation and
            test data and for runs. A folder that is None is below `prefix_path`.
        save_runs: whether the store keeps checkpoints.
        storage_options: arguments for a filesystem of fsspec. With these arguments, the
            store uses fsspec even if pyarrow supports the filesystem.
        checkpoint_filename: the file name of a run's checkpoint.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = self._full_path_or(train_path, "intermediate_train_data")
        self._val_path = self._full_path_or(val_path, "intermediate_val_data")
        self._test_path = self._full_path_or(test_path, "intermediate_test_data")
        self._runs_path = self._full_path_or(runs_path, "runs")
        self._save_runs, self.storage_options = save_runs, storage_options
        self._checkpoint_filename = checkpoint_filename or "checkpoint"
        self._fs: pa.fs.FileSystem | None = None

    def _full_path_or(self, path: str | None, name: str) -> str:
        return self.get_full_path(path) if path else f"{self.prefix_path}/{name}"

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the open filesystem: each process opens the filesystem itself."""
        return {**self.__dict__, "_fs": None}

    # -- paths -------------------------------------------------------------------------

    def get_full_path(self, path: str) -> str:
        """Returns the URL of a path, which Spark needs."""
        if re.match(r"\w[\w+.-]*:/", path):
            return path.rstrip("/")
        return "file://" + os.path.abspath(path)

    def get_localized_path(self, path: str) -> str:
        """Returns a path without protocol, which the filesystem needs."""
        return path.split("://", 1)[-1]

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Returns the folder of the training data with index `idx`."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Returns the folder of the validation data with index `idx`."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Returns the folder of the test data with index `idx`."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def saving_runs(self) -> bool:
        """Returns whether the store keeps checkpoints."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Returns the folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Returns the folder of a run."""
        return f"{self._runs_path}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Returns the folder of a run's checkpoint, or None if no runs are kept."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        """Returns the file name of a run's checkpoint."""
        return self._checkpoint_filename

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Returns the paths of a run's files that end with `suffix`."""
        folder = self.get_localized_path(self.get_run_path(run_id))
        files = self.fs.get_file_info(pa.fs.FileSelector(folder, allow_not_found=True))
        return sorted(f.path for f in files if f.path.endswith(suffix))

    def get_logs_subdir(self) -> str:
        """Returns the name of the folder for logs in the folder of a run."""
        return "logs"

    def get_logs_path(self, run_id: str) -> str | None:
        """Returns the folder for the logs of a run, or None if no runs are kept."""
        path = self.get_checkpoint_path(run_id)
        return path and f"{path}/{self.get_logs_subdir()}"

    # -- files -------------------------------------------------------------------------

    @property
    def fs(self) -> pa.fs.FileSystem:
        """The filesystem, a `pyarrow.fs.FileSystem`."""
        if self._fs is None:
            self._fs = self._open()
        return self._fs

    def get_filesystem(self) -> pa.fs.FileSystem:
        """Returns the filesystem."""
        return self.fs

    def _open(self) -> pa.fs.FileSystem:
        protocol = self.prefix_path.split(":", 1)[0]
        if protocol == "file":
            return pa.fs.LocalFileSystem()
        if self.storage_options is None:
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
                return pa.fs.FileSystem.from_uri(self.prefix_path)[0]
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{self.prefix_path}: pyarrow has no filesystem for {protocol}; "
                "fsspec may have one: pip install fsspec",
                name="fsspec",
            ) from error
        filesystem = fsspec.filesystem(protocol, **(self.storage_options or {}))
        return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(filesystem))

    def exists(self, path: str) -> bool:
        """Returns whether a file or folder exists."""
        info = self.fs.get_file_info(self.get_localized_path(path))
        return bool(info.type != pa.fs.FileType.NotFound)

    def read(self, path: str) -> bytes:
        """Returns the contents of a file."""
        with self.fs.open_input_stream(self.get_localized_path(path)) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        """Replaces a file atomically: a reader receives the old or the new file."""
        target = self.get_localized_path(path)
        self.fs.create_dir(target.rpartition("/")[0], recursive=True)
        with self.fs.open_output_stream(f"{target}.part") as file:
            file.write(data)
        self.fs.move(f"{target}.part", target)

    def write_text(self, path: str, text: str) -> None:
        """Writes a text file."""
        self.write(path, text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        """Returns whether there are Parquet files below a path."""
        try:
            return bool(self.get_parquet_dataset(path).files)
        except (OSError, pa.ArrowInvalid):
            return False

    def get_parquet_dataset(self, path: str) -> pa.dataset.Dataset:
        """Returns the Parquet files below a path as one dataset.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        target = self.get_localized_path(path)
        return pa.dataset.dataset(target, filesystem=self.fs, format="parquet")

    def get_local_output_dir_fn(
        self, run_id: str
    ) -> Callable[[], AbstractContextManager[str]]:
        """Returns a context manager that makes a temporary folder on this machine."""

        @contextlib.contextmanager
        def folder() -> Iterator[str]:
            with tempfile.TemporaryDirectory() as path:
                yield path

        return folder

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies a folder's files to the folder of the run."""

        def copy(folder: str) -> None:
            target = self.get_localized_path(self.get_run_path(run_id))
            self.fs.create_dir(target, recursive=True)
            pa.fs.copy_files(folder, target, destination_filesystem=self.fs)

        return copy


class LocalStore(FilesystemStore):
    """Horovod's older name of `FilesystemStore`."""


class HDFSStore(FilesystemStore):
    """A folder in HDFS, read and written through Hadoop's libhdfs.

    Args:
        prefix_path: ``hdfs://namenode:8020/folder``, ``hdfs:///folder`` or ``/folder``.
        host, port: host and port of the name node, if `prefix_path` does not have them.
        user, kerb_ticket, extra_conf: as for `pyarrow.fs.HadoopFileSystem`.
        driver: an argument without effect.

    Raises:
        ValueError: `prefix_path` has another protocol, or no path.
    """

    FS_PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        match = re.fullmatch(r"(?:(.+?)://([^/:]*)(?::(\d+))?)?(/.+)", prefix_path)
        if match is None or match[1] not in (None, "hdfs"):
            raise ValueError(f"not a folder in HDFS: {prefix_path}")
        self._url_prefix = prefix_path[: match.start(4)] or self.FS_PREFIX
        self._hdfs_kwargs = {
            "host": host or match[2] or "default",
            "port": port or int(match[3] or 0),
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": extra_conf,
        }
        super().__init__(prefix_path, **kwargs)

    def _open(self) -> pa.fs.FileSystem:
        return pa.fs.HadoopFileSystem(**self._hdfs_kwargs)

    def get_full_path(self, path: str) -> str:
        """Returns the URL of a path, including the address of the name node."""
        return path if self.matches(path) else self._url_prefix + path

    def get_localized_path(self, path: str) -> str:
        """Returns a path without protocol and name node."""
        return re.sub(r"^hdfs://[^/]*", "", path)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Returns whether a path is a URL of HDFS."""
        return path.startswith(cls.FS_PREFIX)


class DBFSLocalStore(FilesystemStore):
    """A folder in Databricks' filesystem, which executors mount at ``/dbfs``.

    Raises:
        ValueError: the path is not below ``/dbfs`` or ``dbfs:``.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Returns whether a path is in Databricks' filesystem."""
        return re.match(r"dbfs:/(?!/)|(file:(//)?)?/dbfs/", path) is not None

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """Returns the path that begins with ``/dbfs``.

        Example:
            >>> DBFSLocalStore.normalize_path("dbfs:/runs")
            '/dbfs/runs'
        """
        if not cls.matches_dbfs(path):
            raise ValueError(f"not a path below /dbfs or dbfs: {path}")
        return re.sub(r"^(dbfs:/|(file:(//)?)?/dbfs/)", "/dbfs/", path)

    def get_full_path(self, path: str) -> str:
        """Returns the URL of a path."""
        return "file://" + self.normalize_path(path)
