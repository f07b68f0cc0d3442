"""Read token files in object storage: ``s3://`` (boto3) and ``msc://`` (Multi-Storage Client).

The .idx file is copied once per node to a local directory; .bin is read in byte ranges.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import build_once, temporary_name
from megatron.core.optional import require
from megatron.core.text_files import path_inside

_S3 = "s3://"
_MSC = "msc://"

Client: TypeAlias = Any  # a boto3 client or the module multistorageclient; both are untyped


@dataclass
class ObjectStorageConfig:
    """Local directory for .idx copies, and bytes of .bin per S3 request."""

    path_to_idx_cache: str
    bin_chunk_nbytes: int = 256 * 1024 * 1024


def is_object_storage_path(path: str) -> bool:
    """Return whether ``path`` is an s3:// or msc:// URL."""
    return path.startswith((_S3, _MSC))


def get_index_cache_path(idx_path: str, object_storage_config: ObjectStorageConfig) -> str:
    """Return the local path of a remote .idx: ``path_to_idx_cache`` plus the URL without scheme."""
    without_scheme = idx_path.split("://", 1)[1]
    cache = Path(object_storage_config.path_to_idx_cache)
    return str(path_inside(cache, without_scheme, idx_path, below=True, error=DataError))


def cached_index_path(idx_path: str, config: ObjectStorageConfig) -> str:
    """Copy a remote .idx to this node unless it is cached, and return its local path.

    One of the processes that share the directory downloads, the others wait for the file.  A copy
    with a size different from the remote file is downloaded again.
    """
    local_path = get_index_cache_path(idx_path, config)
    remote = RangeReader(idx_path)

    def load() -> str | None:
        is_complete = os.path.exists(local_path) and os.path.getsize(local_path) == remote.num_bytes
        return local_path if is_complete else None

    def build() -> str:
        temporary_path = temporary_name(local_path)
        remote.download(temporary_path)
        os.replace(temporary_path, local_path)
        return local_path

    return build_once(local_path, load, build, "--object-storage-cache-path")


class RangeReader:
    """Reader of values in a remote file.  Connections are per process: forks must not share one.

    For S3 it caches the last chunk fetched, as the next read is often near; the Multi-Storage
    Client has its own cache.  ``chunk_bytes`` 0 fetches exactly the bytes requested.
    """

    def __init__(self, url: str, chunk_bytes: int = 0) -> None:
        self.url = url
        self._bucket, _, self._key = url.removeprefix(_S3).partition("/")
        self._is_s3 = url.startswith(_S3)
        if self._is_s3 and not (self._bucket and self._key):
            raise DataError(f"{url} names no object: write s3://bucket/path/prefix")
        self._chunk_bytes = chunk_bytes if self._is_s3 else 0
        self._chunk = b""
        self._chunk_start = 0
        self._client_pid = -1
        self._client: Client = None
        self.num_bytes = self._size()

    def client(self) -> Client:
        """Return the connection of this process."""
        if self._client_pid != os.getpid():
            if self._is_s3:
                self._client = require("boto3", self.url).client("s3")
            else:
                self._client = require("multistorageclient", self.url)
            self._client_pid = os.getpid()
        return self._client

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        """Return ``count`` values at byte ``offset``."""
        num_bytes = count * dtype.itemsize
        if not self._chunk_bytes or not num_bytes:
            return np.frombuffer(self._complete(offset, num_bytes), dtype)
        start = offset - self._chunk_start
        if start < 0 or start + num_bytes > len(self._chunk):
            self._chunk_start = offset // self._chunk_bytes * self._chunk_bytes
            start = offset - self._chunk_start
            wanted = max(self._chunk_bytes, start + num_bytes)
            end = min(self._chunk_start + wanted, self.num_bytes)
            self._chunk = self._complete(self._chunk_start, end - self._chunk_start)
        return np.frombuffer(self._chunk[start : start + num_bytes], dtype)

    def download(self, local_path: str) -> None:
        """Copy the complete file."""
        source = (self._bucket, self._key) if self._is_s3 else (self.url,)
        self.client().download_file(*source, local_path)

    def _complete(self, offset: int, num_bytes: int) -> bytes:
        data = self._fetch(offset, num_bytes) if num_bytes else b""
        if len(data) != num_bytes:
            raise DataError(
                f"{self.url}: asked for {num_bytes} bytes at {offset}, got {len(data)}: "
                "the object changed while it was read, or it is cut short"
            )
        return data

    def _size(self) -> int:
        client = self.client()
        if self._is_s3:
            return int(client.head_object(Bucket=self._bucket, Key=self._key)["ContentLength"])
        storage, path = client.resolve_storage_client(self.url)
        return int(storage.info(path).content_length)

    def _fetch(self, offset: int, num_bytes: int) -> bytes:
        client = self.client()
        if self._is_s3:
            wanted = f"bytes={offset}-{offset + num_bytes - 1}"
            answer = client.get_object(Bucket=self._bucket, Key=self._key, Range=wanted)
            return bytes(answer["Body"].read())
        storage, path = client.resolve_storage_client(self.url)
        byte_range = client.types.Range(offset=offset, size=num_bytes)
        return bytes(storage.read(path, byte_range=byte_range))
