"""Where an estimator keeps its data in between, and the checkpoints of its runs.

A folder that the driver and all executors reach under one name, on any filesystem that
pyarrow knows, or fsspec where that is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from ringjax.run import environ


def is_databricks() -> bool:
    """Whether this is Databricks' runtime."""
    return "DATABRICKS_RUNTIME_VERSION" in environ.inherited()


class Store:
    """What all stores have in common; `Store.create` finds the right one."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> FilesystemStore:
        """The store for a path or URL.

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
    """A folder on a filesystem.

    Args:
        prefix_path: a path of this machine, or a URL: ``s3://bucket/folder``.
        train_path, val_path, test_path, runs_path: other places than folders below it.
        save_runs: whether checkpoints are kept.
        storage_options: arguments for fsspec's filesystem, which is taken then.
        checkpoint_filename: the name of a run's checkpoint.
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
        self._train_path = self._place(train_path, "intermediate_train_data")
        self._val_path = self._place(val_path, "intermediate_val_data")
        self._test_path = self._place(test_path, "intermediate_test_data")
        self._runs_path = self._place(runs_path, "runs")
        self._save_runs, self.storage_options = save_runs, storage_options
        self._checkpoint_filename = checkpoint_filename or "checkpoint"
        self._fs: pa.fs.FileSystem | None = None

    def _place(self, path: str | None, name: str) -> str:
        return self.get_full_path(path) if path else f"{self.prefix_path}/{name}"

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the filesystem for itself."""
        return {**self.__dict__, "_fs": None}

    # Places.

    def get_full_path(self, path: str) -> str:
        """The URL of a path, as Spark takes it."""
        if re.match(r"\w[\w+.-]*:/", path):
            return path.rstrip("/")
        return "file://" + os.path.abspath(path)

    def get_localized_path(self, path: str) -> str:
        """The same, as the filesystem takes it: without the protocol."""
        return path.split("://", 1)[-1]

    def get_train_data_path(self, idx: int | None = None) -> str:
        """The folder of the training data number `idx`."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """The folder of the validation data number `idx`."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        """The folder of the test data number `idx`."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def saving_runs(self) -> bool:
        """Whether checkpoints are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """The folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """The folder of a run."""
        return f"{self._runs_path}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The folder of a run's checkpoint."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        """The name of the checkpoint in it."""
        return self._checkpoint_filename

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The files of a run that end so."""
        folder = self.get_localized_path(self.get_run_path(run_id))
        files = self.fs.get_file_info(pa.fs.FileSelector(folder, allow_not_found=True))
        return sorted(f.path for f in files if f.path.endswith(suffix))

    def get_logs_subdir(self) -> str:
        """The name of the folder for logs in that of a run."""
        return "logs"

    def get_logs_path(self, run_id: str) -> str | None:
        """The folder for the logs of a run."""
        path = self.get_checkpoint_path(run_id)
        return path and f"{path}/{self.get_logs_subdir()}"

    # Files.

    @property
    def fs(self) -> Any:
        """The filesystem, one of pyarrow's."""
        if self._fs is None:
            self._fs = self._open()
        return self._fs

    def get_filesystem(self) -> Any:
        """The filesystem."""
        return self.fs

    def _open(self) -> Any:
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
        theirs = fsspec.filesystem(protocol, **(self.storage_options or {}))
        return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(theirs))

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        info = self.fs.get_file_info(self.get_localized_path(path))
        return bool(info.type != pa.fs.FileType.NotFound)

    def read(self, path: str) -> bytes:
        """The contents of a file."""
        with self.fs.open_input_stream(self.get_localized_path(path)) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        """Writes a file; who reads it meanwhile gets the old or the new one."""
        place = self.get_localized_path(path)
        self.fs.create_dir(place.rpartition("/")[0], recursive=True)
        with self.fs.open_output_stream(f"{place}.part") as file:
            file.write(data)
        self.fs.move(f"{place}.part", place)

    def write_text(self, path: str, text: str) -> None:
        """Writes a file of text."""
        self.write(path, text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there are Parquet files."""
        try:
            return bool(self.get_parquet_dataset(path).files)
        except (OSError, pa.ArrowInvalid):
            return False

    def get_parquet_dataset(self, path: str) -> Any:
        """The Parquet files below a path, a `pyarrow.dataset.Dataset`.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        place = self.get_localized_path(path)
        return pa.dataset.dataset(place, filesystem=self.fs, format="parquet")

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """Makes a folder of this machine, for as long as a with statement."""

        @contextlib.contextmanager
        def folder() -> Iterator[str]:
            with tempfile.TemporaryDirectory() as path:
                yield path

        return folder

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A function that copies what is in such a folder to that of the run."""

        def copy(folder: str) -> None:
            place = self.get_localized_path(self.get_run_path(run_id))
            self.fs.create_dir(place, recursive=True)
            pa.fs.copy_files(folder, place, destination_filesystem=self.fs)

        return copy


class LocalStore(FilesystemStore):
    """Horovod's older name of it."""


class HDFSStore(FilesystemStore):
    """A folder in HDFS, by libhdfs, which Hadoop has.

    Args:
        prefix_path: ``hdfs://namenode:8020/folder``, ``hdfs:///folder`` or ``/folder``.
        host, port: of the name node, if they are not in it.
        user, kerb_ticket, extra_conf: those of `pyarrow.fs.HadoopFileSystem`.
        driver: without effect.

    Raises:
        ValueError: another protocol, or no path.
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

    def _open(self) -> Any:
        return pa.fs.HadoopFileSystem(**self._hdfs_kwargs)

    def get_full_path(self, path: str) -> str:
        """The URL of a path, with the name node."""
        return path if self.matches(path) else self._url_prefix + path

    def get_localized_path(self, path: str) -> str:
        """The path without protocol and name node."""
        return re.sub(r"^hdfs://[^/]*", "", path)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether it is a URL of HDFS."""
        return path.startswith(cls.FS_PREFIX)


class DBFSLocalStore(FilesystemStore):
    """A folder in Databricks' filesystem, which executors have under ``/dbfs``.

    Raises:
        ValueError: not a path below ``/dbfs`` or ``dbfs:``.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Whether it is such a path."""
        return re.match(r"dbfs:/(?!/)|(file:(//)?)?/dbfs/", path) is not None

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """The path that begins with ``/dbfs``.

        Example:
            >>> DBFSLocalStore.normalize_path("dbfs:/runs")
            '/dbfs/runs'
        """
        if not cls.matches_dbfs(path):
            raise ValueError(f"not a path below /dbfs or dbfs: {path}")
        return re.sub(r"^(dbfs:/|(file:(//)?)?/dbfs/)", "/dbfs/", path)

    def get_full_path(self, path: str) -> str:
        """The URL of a path."""
        return "file://" + self.normalize_path(path)
