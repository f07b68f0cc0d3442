"""Compressed text and Parquet as a stream of bytes; a damaged file is an error."""

from __future__ import annotations

import gzip
import os
import zlib
from typing import Any, BinaryIO

from megatron.core.config.errors import DataError
from megatron.core.optional import require
from megatron.training.preprocess.file_kinds import is_parquet
from megatron.training.preprocess.parquet import ParquetLines

SUFFIXES = (".gz", ".zst")
_STORED_BYTES = 1 << 17  # read from the disk at once


class Stream:
    """The bytes of a file, decompressed by its name, or JSON lines of Parquet; to be closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._raw = open(path, "rb")  # noqa: SIM115
        self._errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
        self._source: Any = self._raw
        if path.endswith(".gz"):
            self._source = gzip.GzipFile(fileobj=self._raw)
        elif path.endswith(".zst"):
            zstandard = require("zstandard", f"--input {path}")
            self._errors = (*self._errors, zstandard.ZstdError)
            self._source = _ZstdFrames(self._raw, zstandard)
        elif is_parquet(path):
            self._source = ParquetLines(path)

    def read(self, num_bytes: int = -1) -> bytes:
        """The next bytes, fewer than asked for at the end; all that are left for -1."""
        try:
            return self._source.read(num_bytes)
        except self._errors as error:
            raise DataError(f"{self.path} is damaged: {error}; copy it again") from error

    def stored_position(self) -> int:
        """How many bytes of the file on disk have been read."""
        if isinstance(self._source, ParquetLines):
            return self._source.stored_position()
        return self._raw.tell()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()
        self._raw.close()


class _ZstdFrames:
    """Frames one after the other.  zstandard's own reader takes a cut frame for a whole one."""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None  # None: between two frames
        self._stored = b""
        self._ready = bytearray()

    def read(self, num_bytes: int) -> bytes:
        while num_bytes < 0 or len(self._ready) < num_bytes:
            if not self._stored:
                self._stored = self._raw.read(_STORED_BYTES)
                if not self._stored:
                    self._check_end()
                    break
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._ready += self._frame.decompress(self._stored)
            self._stored = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        taken = len(self._ready) if num_bytes < 0 else num_bytes
        data = bytes(self._ready[:taken])
        del self._ready[:taken]
        return data

    def close(self) -> None:
        self._frame = None

    def _check_end(self) -> None:
        if self._frame is not None:
            raise EOFError("it ends inside a compressed frame")


def uncompressed_extension(path: str) -> str:
    """``.jsonl`` of ``a.jsonl`` and of ``a.jsonl.gz``."""
    stem, extension = os.path.splitext(path)
    return os.path.splitext(stem)[1] if extension in SUFFIXES else extension
