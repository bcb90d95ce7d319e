"""Stores in which estimators keep data, models and checkpoints. Driver and executors reach them alike, by fsspec."""

from __future__ import annotations

import re
import socket
from typing import Any

from ..host import machine
from ..launch.errors import LaunchError
from ..text.deprecation import find_former_name

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]


class Store:
    """Directory of a file system that fsspec supports.

    It contains `data/NAME` with training data, and `runs/RUN` with the results of a run. `prefix_path` is a path, or a
    URL such as `s3://bucket/training`. The packages that fsspec needs for it must be installed on driver and executors
    (`s3fs` for s3). `options` are those of fsspec, such as keys and endpoints.
    """

    def __init__(self, prefix_path: str, **options: Any) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError as error:
            raise LaunchError("a Store needs fsspec: pip install '.[spark]' in the source tree") from error
        self.prefix_path = self._normalize_path(prefix_path).rstrip("/")
        self.options = options
        self._url_to_fs = url_to_fs

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_store, (type(self), self.prefix_path, self.options)

    @staticmethod
    def _normalize_path(path: str) -> str:
        return path

    @staticmethod
    def create(prefix_path: str, **options: Any) -> Store:
        """Create the store of the class that a path requires.

        `hdfs://...` takes an `HDFSStore`; `/dbfs/...`, `dbfs:/...` or `/Volumes/...` a `DBFSLocalStore`; another URL a
        `FilesystemStore`; a path a `LocalStore`.
        """
        for kind in (HDFSStore, DBFSLocalStore):
            if kind.matches(prefix_path):
                return kind(prefix_path, **options)
        plain = FilesystemStore if "://" in prefix_path else LocalStore
        return plain(prefix_path, **options)

    @property
    def fs(self) -> Any:
        """File system of fsspec."""
        return self._url_to_fs(self.prefix_path, **self.options)[0]

    def get_full_path(self, path: str) -> str:
        """Return the path in the file system of a path below the store."""
        root: str = self._url_to_fs(self.prefix_path, **self.options)[1]
        return f"{root.rstrip('/')}/{path}" if path else root

    def get_data_path(self, name: str) -> str:
        """Return the path of a data set, below the store."""
        return f"data/{name}"

    def get_run_path(self, run_id: str) -> str:
        """Return the path of a run's results, below the store."""
        return f"runs/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the path of the newest model of a run, below the store."""
        return f"{self.get_run_path(run_id)}/checkpoint"

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists below the store."""
        return bool(self.fs.exists(self.get_full_path(path)))

    def read(self, path: str) -> bytes:
        """Return the content of a file below the store."""
        try:
            data: bytes = self.fs.cat_file(self.get_full_path(path))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{socket.gethostname()} does not find {path} in {self.prefix_path}: a store must be one place for the "
                "driver and all executors"
            ) from error
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file below the store, atomically as far as the file system can, since others may read it."""
        full, fs = self.get_full_path(path), self.fs
        fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{full}.new", data)
        fs.mv(f"{full}.new", full)

    def remove(self, path: str) -> None:
        """Remove a file or a directory below the store, if it exists."""
        if self.exists(path):
            self.fs.rm(self.get_full_path(path), recursive=True)


def _make_store(kind: type[Store], path: str, options: dict[str, Any]) -> Store:
    return kind(path, **options)


def __getattr__(name: str) -> Any:
    return find_former_name(__name__, name, {"_made": _make_store})


class FilesystemStore(Store):
    """Store at a URL of any file system that fsspec supports."""


class LocalStore(FilesystemStore):
    """Store in a directory that driver and executors share: on one machine, or on a shared file system."""

    @staticmethod
    def _normalize_path(path: str) -> str:
        """Make a path absolute, since executors have another working directory than the driver."""
        return path if "://" in path else str(machine.absolute_path(path))


class HDFSStore(FilesystemStore):
    """Store in HDFS. fsspec reaches it by pyarrow, which needs libhdfs and Hadoop's class path on every host."""

    @staticmethod
    def matches(path: str) -> bool:
        """Return whether a path is in HDFS."""
        return path.startswith("hdfs://")


class DBFSLocalStore(LocalStore):
    """Store in Databricks' file system, which driver and executors see as a directory.

    Files there are written sequentially from beginning to end, since such directories guarantee no more.
    """

    @staticmethod
    def matches(path: str) -> bool:
        """Return whether a path is in Databricks' file system."""
        return re.match(r"dbfs:/|file:/+(dbfs|Volumes)/|/dbfs/|/Volumes/", path) is not None

    @staticmethod
    def _normalize_path(path: str) -> str:
        path = re.sub(r"^(dbfs:|file:)/+(?=Volumes/)", "/", path)
        return re.sub(r"^(dbfs:/+|file:/+dbfs/|/dbfs/)", "/dbfs/", path)
